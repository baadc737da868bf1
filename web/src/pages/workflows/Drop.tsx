/** Accepts a file that may contain a workflow: dropped anywhere on the page, or picked. */

import { type ReactNode, useEffect, useRef, useState } from "react"
import { api, useAct } from "@/api"
import type { WorkflowInspection } from "@/api/schema"
import { Button, ErrorNote, Icon } from "@/ui"
import { words } from "@/words/en/workflows"

export interface Opened {
  name: string
  inspection: WorkflowInspection
}

const ACCEPT = ".json,image/*,video/*,audio/*"

/** Sends the file to the control plane, which parses workflows. */
export function useOpen(onOpened: (opened: Opened) => void) {
  const [name, setName] = useState("")
  const act = useAct(async (file: Blob, filename: string) => {
    setName(filename)
    // Sent as plain bytes, because the control plane detects the type from the content.
    const bytes = file.slice(0, file.size, "application/octet-stream")
    const inspection = await api.post<WorkflowInspection>("/api/admin/workflows/inspect", bytes)
    onOpened({ name: filename, inspection })
  })
  return { name, act }
}

/** Returns true while the user drags a file over the page. */
export function useDropped(onFile: (file: File) => void): boolean {
  const [isOver, setOver] = useState(false)
  const latest = useRef(onFile)
  latest.current = onFile
  useEffect(() => {
    const hasFile = (event: DragEvent) => event.dataTransfer?.types.includes("Files") ?? false
    const over = (event: DragEvent) => {
      if (!hasFile(event)) return
      event.preventDefault()
      setOver(true)
    }
    const leave = (event: DragEvent) => {
      if (event.relatedTarget === null) setOver(false)
    }
    const drop = (event: DragEvent) => {
      setOver(false)
      const file = event.dataTransfer?.files[0]
      if (!file) return
      event.preventDefault()
      latest.current(file)
    }
    document.addEventListener("dragover", over)
    document.addEventListener("dragleave", leave)
    document.addEventListener("drop", drop)
    return () => {
      document.removeEventListener("dragover", over)
      document.removeEventListener("dragleave", leave)
      document.removeEventListener("drop", drop)
    }
  }, [])
  return isOver
}

export function PickButton({
  accept,
  onFile,
  children,
  label,
  kind,
  size,
}: {
  accept: string
  onFile: (file: File) => void
  children: ReactNode
  /** The accessible name of the file input, for screen readers and tests. */
  label: string
  kind?: "plain" | "go" | "ink" | "ghost"
  size?: "small" | "normal"
}) {
  const input = useRef<HTMLInputElement>(null)
  return (
    <>
      <Button kind={kind} size={size} icon="upload" onClick={() => input.current?.click()}>
        {children}
      </Button>
      <input
        ref={input}
        type="file"
        hidden
        accept={accept}
        aria-label={label}
        onChange={(event) => {
          const file = event.target.files?.[0]
          event.target.value = ""
          if (file) onFile(file)
        }}
      />
    </>
  )
}

/** The drop area, with the last file's error. */
export function Drop({
  onOpened,
  kind = "go",
}: {
  onOpened: (opened: Opened) => void
  kind?: "go" | "plain"
}) {
  const open = useOpen(onOpened)
  const take = (file: File) => void open.act.run(file, file.name)
  const isOver = useDropped(take)
  const { error, isRunning } = open.act
  if (error)
    return (
      <ErrorNote error={error} title={words.notOne(open.name)}>
        <PickButton accept={ACCEPT} label={words.pickAnother} size="small" kind="plain" onFile={take}>
          {words.pickAnother}
        </PickButton>
      </ErrorNote>
    )
  return (
    <div className={isOver ? "workflows-drop is-over" : "workflows-drop"} aria-busy={isRunning || undefined}>
      <Icon name="upload" />
      <div className="note-text">
        <strong>{isRunning ? words.reading(open.name) : isOver ? words.dropNow : words.drop}</strong>
        <span>{words.dropText}</span>
      </div>
      <PickButton accept={ACCEPT} label={words.pick} kind={kind} onFile={take}>
        {words.pick}
      </PickButton>
    </div>
  )
}
