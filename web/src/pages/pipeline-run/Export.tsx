/** Exports candidates as one ZIP file, created in the browser, with pictures by step, an index and
 * a contact sheet. */

import { useEffect, useRef, useState } from "react"
import { useAct } from "@/api"
import type { PipelineRunAnswer } from "@/api/schema"
import { Button, bytes, Choices, Code, Dialog, ErrorNote, Progress, saveFile, toast } from "@/ui"
import { words } from "@/words/en/pipelines"
import type { Candidate } from "./candidates"
import { exportZip, type Part } from "./pack"
import type { Book } from "./useRun"
import { BYTES_MAX, FILES_MAX } from "./zip"

type Which = keyof typeof words.exports.choices
const OPTIONS = (Object.keys(words.exports.choices) as Which[]).map((value) => ({
  value,
  label: words.exports.choices[value],
}))

function isWanted({ status }: Candidate, which: Which): boolean {
  if (which === "chosen") return status === "approved" || status === "winner"
  return which === "all" || status !== "rejected"
}

interface ExportProps {
  book: Book
  run: PipelineRunAnswer
  open: boolean
  onClose: () => void
}

export function Export({ book, run, open, onClose }: ExportProps) {
  const hasChosen = book.all.some((candidate) => isWanted(candidate, "chosen"))
  const [choice, setChoice] = useState<Which | null>(null)
  const which = choice ?? (hasChosen ? "chosen" : "kept")
  const [done, setDone] = useState(0)
  const abort = useRef<AbortController | null>(null)
  useEffect(() => () => abort.current?.abort(), [])
  const exported = book.all.filter(
    (candidate) => isWanted(candidate, which) && (candidate.url !== null || candidate.text !== null),
  )
  const size = exported.reduce((sum, candidate) => sum + candidate.size, 0)
  const isTooLarge = size > BYTES_MAX || exported.length > FILES_MAX || book.list.data?.next != null
  const pack = useAct(async () => {
    const stop = new AbortController()
    abort.current = stop
    setDone(0)
    const parts: Part[] = exported.map((candidate) => ({
      candidate,
      label: book.labels.get(candidate.id) ?? "",
    }))
    const zip = await exportZip(run, parts, setDone, stop.signal).catch((thrown) => {
      if (stop.signal.aborted) return null
      throw thrown
    })
    if (zip === null) return
    saveFile(zip, `${fileName(run.pipeline)}-${run.id.slice(0, 8)}.zip`)
    toast({ title: words.exports.done(exported.length) })
    onClose()
  })
  const close = () => {
    abort.current?.abort()
    pack.forget()
    onClose()
  }
  const off = exported.length === 0 ? words.exports.nothing : isTooLarge && words.exports.tooLarge
  return (
    <Dialog
      open={open}
      onClose={close}
      title={words.exports.title}
      actions={
        <>
          <Button onClick={close}>{pack.isRunning ? words.exports.stop : words.side.close}</Button>
          <Button
            kind="go"
            icon="download"
            offReason={off}
            busy={pack.isRunning}
            onClick={() => void pack.run()}
          >
            {words.exports.act}
          </Button>
        </>
      }
    >
      <Choices label={words.exports.which} hideLabel options={OPTIONS} value={which} onChange={setChoice} />
      <p className="dialog-text">
        <b>{words.exports.counted(exported.length, bytes(size))}</b>. {words.exports.text}
      </p>
      {pack.isRunning && (
        <div className="stack">
          <span className="faint">{words.exports.progress(done, exported.length)}</span>
          <Progress
            label={words.exports.label}
            value={exported.length ? done / exported.length : 0}
            state="ink"
          />
        </div>
      )}
      {pack.error && <ErrorNote error={pack.error} onRetry={() => void pack.run()} />}
      {off && <p className="dialog-text">{off}</p>}
      <Code text={`comfyfleet pipeline export ${run.id} -o results`} label={words.exports.command} />
    </Dialog>
  )
}

function fileName(name: string): string {
  return (
    name
      .toLowerCase()
      .replace(/[^\p{L}\p{N}]+/gu, "-")
      .replace(/^-|-$/g, "") || "run"
  )
}
