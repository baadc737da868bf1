/** Lists a graph's versions, and compares two line by line. */

import { useState } from "react"
import { useQuery } from "@/api"
import type { GraphAnswer } from "@/api/schema"
import { Button, Dialog, Loaded, Select } from "@/ui"
import { words } from "@/words/en/canvas"
import { diffOf } from "./diff"
import { documentOf, type GraphDocument } from "./document"
import { yamlOf } from "./yaml"

interface VersionsProps {
  open: boolean
  onClose: () => void
  graphId: string | null
  newest: number
  /** The document in its current state on the canvas. */
  document: GraphDocument
  onTake: (document: GraphDocument, version: number) => void
}

export function Versions(props: VersionsProps) {
  const { open, onClose, graphId } = props
  return (
    <Dialog open={open} onClose={onClose} title={words.versionsTitle} wide>
      {graphId ? <Compare {...props} graphId={graphId} /> : <p>{words.versionsNone}</p>}
    </Dialog>
  )
}

function Compare({ graphId, newest, document, onTake, onClose }: VersionsProps & { graphId: string }) {
  const [before, setBefore] = useState(String(Math.max(1, newest)))
  const [after, setAfter] = useState("")
  const numbers = Array.from({ length: newest }, (_, at) => String(newest - at))
  const options = numbers.map((value) => ({ value, label: words.versionNamed(Number(value)) }))
  const old = useVersion(graphId, before)
  const other = useVersion(graphId, after || before)
  const now = { value: "", label: words.unsavedNow }
  return (
    <>
      <div className="canvas-compare">
        <Select label={words.compare} options={options} value={before} onChange={setBefore} />
        <Select label={words.with} options={[now, ...options]} value={after} onChange={setAfter} />
      </div>
      <Loaded query={old}>
        {(first) => (
          <Loaded query={other}>
            {(second) => <Lines before={textOf(first)} after={after ? textOf(second) : yamlOf(document)} />}
          </Loaded>
        )}
      </Loaded>
      <div className="dialog-actions">
        <Button
          icon="undo"
          onClick={() => {
            const drawing = old.data && documentOf(old.data.document)
            if (drawing) onTake(drawing, Number(before))
            onClose()
          }}
        >
          {words.takeVersion(Number(before))}
        </Button>
      </div>
    </>
  )
}

function useVersion(graphId: string, version: string) {
  return useQuery<GraphAnswer>(`/api/graphs/${graphId}`, { query: { version }, freshSeconds: 600 })
}

function textOf({ document }: GraphAnswer): string {
  const drawing = documentOf(document)
  return drawing ? yamlOf(drawing) : JSON.stringify(document, null, 2)
}

function Lines({ before, after }: { before: string; after: string }) {
  const lines = diffOf(before, after)
  if (lines.every((line) => line.kind === "same")) return <p>{words.noDifference}</p>
  return (
    // biome-ignore lint/a11y/noNoninteractiveTabindex: keyboard users must be able to scroll it
    <pre className="canvas-diff" tabIndex={0}>
      {lines.map(({ kind, text }, at) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: a line is identified by its position
        <span key={at} className={`is-${kind}`}>
          {kind === "same" ? "  " : kind === "gone" ? "− " : "+ "}
          {kind !== "same" && <span className="unseen">{kind === "gone" ? words.gone : words.added} </span>}
          {text}
          {"\n"}
        </span>
      ))}
    </pre>
  )
}
