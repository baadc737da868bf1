/** Actions on a worker. Reversible actions run immediately, and the others ask for confirmation. */

import { type ReactNode, useCallback, useState } from "react"
import { api, useAct } from "@/api"
import type { NewKey, Revoked, WorkerAnswer } from "@/api/schema"
import { notifyFailed } from "@/pages/jobs/BulkBar"
import { Button, Choices, Confirm, Dialog, ErrorNote, Menu, toast } from "@/ui"
import { ShownOnce } from "@/ui/ShownOnce"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/workers"
import type { Condition } from "./machines"
import { readAgain, WORKERS } from "./useMachines"

type OpenDialog = { kind: "revoke" | "rotate" | "letIn"; name: string } | null

/** Opens the confirmation before an action that can't be undone. */
export type Ask = (kind: "revoke" | "rotate" | "letIn", worker: string) => void

async function post<T = WorkerAnswer>(name: string, act: string, body?: unknown): Promise<T> {
  const answer = await api.post<T>(`${WORKERS}/${encodeURIComponent(name)}/${act}`, body)
  readAgain()
  return answer
}

async function setDraining(name: string, isDraining: boolean): Promise<void> {
  await post(name, isDraining ? "drain" : "undrain")
  toast({
    title: isDraining ? words.drains(name) : words.takenBack(name),
    ...(isDraining && { text: words.drainsText }),
    state: isDraining ? "running" : "succeeded",
    act: { label: words.undo, run: () => void setDraining(name, !isDraining).catch(notifyFailed) },
  })
}

export async function approve(worker: string): Promise<void> {
  await post(worker, "approve")
  toast({ title: words.approved(worker) })
}

export interface Questions {
  ask: Ask
  /** The dialogs, which the page must render. */
  dialogs: ReactNode
}

export function useQuestions(): Questions {
  const [dialog, setDialog] = useState<OpenDialog>(null)
  const [newKey, setNewKey] = useState<(NewKey & { isNow: boolean }) | null>(null)
  const close = () => setDialog(null)
  const name = dialog?.name ?? ""
  return {
    // Keeps its identity, so that rows render again only if their worker has changed.
    ask: useCallback((kind, worker) => setDialog({ kind, name: worker }), []),
    dialogs: (
      <>
        <Confirm
          open={dialog?.kind === "revoke"}
          onClose={close}
          title={words.askRevoke(name)}
          act={words.actRevoke}
          onConfirm={async () => {
            const done = await post<Revoked>(name, "revoke")
            toast({ title: words.revoked(name, done.requeued), text: done.hint, state: "cancelled" })
          }}
        >
          {words.askRevokeText}
        </Confirm>
        <Confirm
          open={dialog?.kind === "letIn"}
          onClose={close}
          title={words.askLetIn(name)}
          act={words.actLetIn}
          kind="ink"
          onConfirm={() => approve(name)}
        >
          {words.askLetInText}
        </Confirm>
        {dialog?.kind === "rotate" && (
          <Rotate
            name={name}
            onClose={close}
            onMade={(key, isNow) => {
              close()
              setNewKey({ ...key, isNow })
            }}
          />
        )}
        {newKey && (
          <ShownOnce
            title={words.newKey(newKey.worker_id)}
            text={newKey.isNow ? words.newKeyNowText : words.newKeyText}
            label={words.keyLabel}
            secret={newKey.token}
            onDone={() => setNewKey(null)}
          />
        )}
      </>
    ),
  }
}

interface RotateProps {
  name: string
  onClose: () => void
  onMade: (key: NewKey, isNow: boolean) => void
}

function Rotate({ name, onClose, onMade }: RotateProps) {
  const [when, setWhen] = useState<"soon" | "now">("soon")
  const isNow = when === "now"
  const rotate = useAct(async () => onMade(await post<NewKey>(name, "rotate-token", { now: isNow }), isNow))
  return (
    <Dialog
      open
      onClose={onClose}
      title={words.askRotate(name)}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="ink" busy={rotate.isRunning} onClick={() => void rotate.run()}>
            {words.actRotate}
          </Button>
        </>
      }
    >
      <p className="dialog-text">{isNow ? words.rotateNowText : words.askRotateText}</p>
      <Choices
        label={words.rotateWhen}
        options={[
          { value: "soon", label: words.rotateSoon },
          { value: "now", label: words.rotateNow },
        ]}
        value={when}
        onChange={setWhen}
      />
      {rotate.error && <ErrorNote error={rotate.error} />}
    </Dialog>
  )
}

interface ActsProps {
  name: string
  condition: Condition
  ask: Ask
  size?: "small" | "normal"
}

/** The buttons for one worker. */
export function WorkerButtons({ name, condition, ask, size = "small" }: ActsProps) {
  const run = (act: (worker: string) => Promise<void>) => () => void act(name).catch(notifyFailed)
  if (condition === "pending")
    return (
      <>
        <Button kind="go" size={size} onClick={run(approve)}>
          {words.approve}
        </Button>
        <Button kind="ghost" size={size} onClick={() => ask("revoke", name)}>
          {words.refuse}
        </Button>
      </>
    )
  if (condition === "revoked")
    return (
      <Button size={size} onClick={() => ask("letIn", name)}>
        {words.letIn}
      </Button>
    )
  const isLost = condition === "offline"
  return (
    <>
      {isLost && (
        <Button kind="stop" size={size} onClick={() => ask("revoke", name)}>
          {words.revoke}
        </Button>
      )}
      {condition === "draining" && (
        <Button size={size} onClick={run((worker) => setDraining(worker, false))}>
          {words.takeBack}
        </Button>
      )}
      {!isLost && condition !== "draining" && (
        <Button size={size} onClick={run((worker) => setDraining(worker, true))}>
          {words.drain}
        </Button>
      )}
      <Menu
        label={words.moreOf(name)}
        size={size}
        items={[
          {
            key: "jobs",
            label: words.jobsOf,
            icon: "play",
            href: `/console/jobs?worker=${encodeURIComponent(name)}`,
          },
          { key: "rotate", label: words.rotate, icon: "key", run: () => ask("rotate", name) },
          !isLost && {
            key: "revoke",
            label: words.revokeItem,
            icon: "cross",
            danger: true,
            run: () => ask("revoke", name),
          },
        ]}
      />
    </>
  )
}
