/** Actions on the selected jobs, with their confirmations. */

import { useState } from "react"
import { api, cache, useAct } from "@/api"
import type { BulkAct, WorkflowAnswer } from "@/api/schema"
import { Button, Confirm, Dialog, ErrorNote, Field, Menu, toast } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/jobs"
import { actOn, type Chosen, type Done } from "./bulk"

export type OpenDialog = "retry" | "cancel" | "priority" | null

const WORKFLOWS = "/api/admin/workflows"
const PRIORITY_MAX = 1000

export function notifyDone(act: BulkAct, { done, failed }: Done): void {
  const why = failed[0]?.message
  toast({
    title: words.done[act](done),
    state: why && done === 0 ? "failed" : "succeeded",
    ...(why && { text: words.notDone(failed.length, why) }),
  })
}

/** Pauses or resumes a workflow. Both can be undone, so there is no confirmation. */
export async function setPaused(name: string, isPaused: boolean): Promise<void> {
  await api.post(`${WORKFLOWS}/${encodeURIComponent(name)}/${isPaused ? "pause" : "resume"}`)
  cache.invalidate(WORKFLOWS)
  toast({
    title: isPaused ? words.paused(name) : words.resumed(name),
    state: isPaused ? "cancelled" : "succeeded",
    ...(isPaused && { text: words.pausedText }),
    act: { label: words.undo, run: () => void setPaused(name, !isPaused).catch(notifyFailed) },
  })
}

export function notifyFailed(thrown: unknown): void {
  toast({ title: thrown instanceof Error ? thrown.message : String(thrown), state: "failed" })
}

interface BulkBarProps {
  chosen: Chosen
  /** The number of selected jobs. Null means all matching jobs. */
  count: number | null
  dialog: OpenDialog
  onDialog: (dialog: OpenDialog) => void
  onDone: () => void
  onSelectAll: (() => void) | null
  onSelectNone: () => void
  /** The workflows of the selected jobs. */
  workflows: readonly WorkflowAnswer[]
}

export function BulkBar(props: BulkBarProps) {
  const { chosen, count, dialog, onDialog, onDone, onSelectAll, onSelectNone, workflows } = props
  const run = async (act: BulkAct, priority: number | null = null) => {
    notifyDone(act, await actOn(act, chosen, priority))
    onDone()
  }
  const retry = useAct(async () => run("retry"))
  const close = () => onDialog(null)
  return (
    <section className="jobs-bulk" aria-label={words.bulk}>
      <strong aria-live="polite">{count === null ? words.allSelected : words.selected(count)}</strong>
      <Button
        icon="again"
        busy={retry.isRunning}
        onClick={() => (count === null ? onDialog("retry") : void retry.run())}
      >
        {words.retry} <kbd className="wide-only">R</kbd>
      </Button>
      <Button onClick={() => onDialog("priority")}>
        {words.priority} <kbd className="wide-only">P</kbd>
      </Button>
      <Button kind="stop" onClick={() => onDialog("cancel")}>
        {words.cancel}
      </Button>
      {workflows.length > 0 && (
        <Menu
          label={words.pause}
          kind="plain"
          upwards
          items={workflows.map(({ slug, is_paused }) => ({
            key: slug,
            label: is_paused ? words.resumeOne(slug) : words.pauseOne(slug),
            icon: is_paused ? "play" : "pause",
            run: () => void setPaused(slug, !is_paused).catch(notifyFailed),
          }))}
        >
          {words.pause}
        </Menu>
      )}
      {onSelectAll && (
        <Button kind="ghost" onClick={onSelectAll}>
          {words.selectMatching}
        </Button>
      )}
      <Button kind="ghost" onClick={onSelectNone}>
        {words.selectNone}
      </Button>
      {retry.error && <ErrorNote error={retry.error} />}
      <Confirm
        open={dialog === "cancel"}
        onClose={close}
        title={words.askCancel(count)}
        act={words.actCancel}
        onConfirm={() => run("cancel")}
      >
        {words.askCancelText}
      </Confirm>
      <Confirm
        open={dialog === "retry"}
        onClose={close}
        title={words.askRetry}
        act={words.actRetry}
        kind="ink"
        onConfirm={() => run("retry")}
      >
        {words.askRetryText}
      </Confirm>
      <AskPriority
        open={dialog === "priority"}
        title={words.askPriority(count)}
        onClose={close}
        onSet={(priority) => run("reprioritise", priority)}
      />
    </section>
  )
}

interface AskPriorityProps {
  open: boolean
  title: string
  onClose: () => void
  onSet: (priority: number) => Promise<unknown>
}

export function AskPriority({ open, title, onClose, onSet }: AskPriorityProps) {
  const [text, setText] = useState("10")
  const set = useAct(async () => {
    await onSet(Number(text))
    onClose()
  })
  const isWrong = !/^[+-]?\d{1,4}$/.test(text.trim()) || Math.abs(Number(text)) > PRIORITY_MAX
  const close = () => {
    set.forget()
    onClose()
  }
  const submit = () => {
    if (!isWrong) void set.run()
  }
  return (
    <Dialog
      open={open}
      onClose={close}
      title={title}
      actions={
        <>
          <Button onClick={close}>{common.cancel}</Button>
          <Button kind="ink" busy={set.isRunning} offReason={isWrong && words.priorityWrong} onClick={submit}>
            {words.actPriority}
          </Button>
        </>
      }
    >
      <Field
        label={words.priority}
        inputMode="numeric"
        autoFocus
        value={text}
        hint={words.priorityHint}
        error={isWrong && words.priorityWrong}
        onChange={(event) => setText(event.target.value)}
        onKeyDown={(event) => {
          if (event.key === "Enter") submit()
        }}
      />
      {set.error && <ErrorNote error={set.error} />}
    </Dialog>
  )
}
