/** Dialogs that create a fleet, add workers, renew the fleet's secret, and change its workflows and
 * settings. */

import { useState } from "react"
import { api, useAct, useQuery } from "@/api"
import type {
  AssignmentAnswer,
  FleetAnswer,
  FleetDetails,
  FleetSecret,
  NewFleet as NewFleetBody,
  Workflows,
} from "@/api/schema"
import { fleetName, loopbackAddressIn, reachableAddress } from "@/pages/workers/machines"
import { FLEETS, readAgain } from "@/pages/workers/useMachines"
import {
  Button,
  Check,
  Choices,
  Code,
  Confirm,
  Dialog,
  Empty,
  ErrorNote,
  Field,
  Icon,
  LinkButton,
  Loaded,
  Select,
  Skeleton,
  toast,
} from "@/ui"
import { ShownOnce } from "@/ui/ShownOnce"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/workers"
import { FleetTerms } from "./Prompts"

export function fleetPath({ slug, stage }: { slug: string; stage: string }): string {
  return `${FLEETS}/${encodeURIComponent(slug)}/${encodeURIComponent(stage)}`
}

export type FleetDialog =
  | { kind: "new" }
  | { kind: "join"; fleet: FleetAnswer | null }
  | { kind: "secret" | "assign" | "settings" | "prompts"; fleet: FleetAnswer }

interface DialogsProps {
  dialog: FleetDialog | null
  onDialog: (dialog: FleetDialog | null) => void
  fleets: readonly FleetAnswer[]
}

/** Renders the open dialog, or the secret that a dialog has created. */
export function FleetDialogs({ dialog, onDialog, fleets }: DialogsProps) {
  const [created, setCreated] = useState<FleetSecret | null>(null)
  const close = () => onDialog(null)
  const show = (secret: FleetSecret) => {
    close()
    setCreated(secret)
    readAgain()
  }
  return (
    <>
      {dialog?.kind === "new" && <NewFleet onClose={close} onMade={show} />}
      {dialog?.kind === "join" && (
        <Join
          fleets={fleets}
          first={dialog.fleet}
          onClose={close}
          onSecret={(fleet) => onDialog({ kind: "secret", fleet })}
        />
      )}
      {dialog?.kind === "secret" && (
        <Confirm
          open
          onClose={close}
          title={words.fleets.askSecret(fleetName(dialog.fleet))}
          act={words.fleets.actSecret}
          onConfirm={async () =>
            setCreated(await api.post<FleetSecret>(`${fleetPath(dialog.fleet)}/rotate-secret`))
          }
        >
          {words.fleets.askSecretText}
        </Confirm>
      )}
      {dialog?.kind === "assign" && <Assign fleet={dialog.fleet} onClose={close} />}
      {dialog?.kind === "settings" && <Settings fleet={dialog.fleet} onClose={close} />}
      {dialog?.kind === "prompts" && (
        <FleetTerms fleet={dialog.fleet} path={fleetPath(dialog.fleet)} onClose={close} />
      )}
      {created && (
        <ShownOnce
          title={words.fleets.secret(fleetName(created))}
          text={words.fleets.secretText}
          label={words.fleets.secretLabel}
          secret={created.secret}
          onDone={() => setCreated(null)}
        >
          <p className="dialog-text">{words.addText}</p>
          <JoinCommand text={created.join} />
        </ShownOnce>
      )}
    </>
  )
}

const NAME = /^[a-z0-9][a-z0-9_-]{0,59}$/
const APPROVALS = (["auto", "manual"] as const).map((value) => ({
  value,
  label: words.fleets.approvalsShort[value] ?? value,
}))

function capOf(text: string): number | null | undefined {
  if (text.trim() === "") return null
  const value = Number(text)
  return Number.isInteger(value) && value > 0 ? value : undefined
}

interface NewFleetProps {
  onClose: () => void
  onMade: (secret: FleetSecret) => void
}

function NewFleet({ onClose, onMade }: NewFleetProps) {
  const [slug, setSlug] = useState("")
  const [stage, setStage] = useState("production")
  const [approval, setApproval] = useState<"auto" | "manual">("auto")
  const [cap, setCap] = useState("")
  const [isChecked, setChecked] = useState(false)
  const isRight = NAME.test(slug) && NAME.test(stage) && capOf(cap) !== undefined
  const make = useAct(async () => {
    const body: NewFleetBody = { slug, stage, approval, max_workers: capOf(cap) ?? null }
    onMade(await api.post<FleetSecret>(FLEETS, body))
  })
  return (
    <Dialog
      open
      onClose={onClose}
      title={words.fleets.make}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="ink" type="submit" form="new-fleet" busy={make.isRunning}>
            {words.fleets.makeAct}
          </Button>
        </>
      }
    >
      <form
        id="new-fleet"
        className="stack"
        noValidate
        onSubmit={(event) => {
          event.preventDefault()
          setChecked(true)
          if (isRight) void make.run()
        }}
      >
        <Field
          label={words.fleets.name}
          hint={words.fleets.nameHint}
          error={isChecked && !NAME.test(slug) && words.fleets.nameWrong}
          value={slug}
          maxLength={60}
          autoComplete="off"
          autoFocus
          onChange={(event) => setSlug(event.target.value)}
        />
        <Field
          label={words.fleets.stage}
          hint={words.fleets.stageHint}
          error={isChecked && !NAME.test(stage) && words.fleets.nameWrong}
          value={stage}
          maxLength={60}
          autoComplete="off"
          onChange={(event) => setStage(event.target.value)}
        />
        <Choices label={words.fleets.approval} options={APPROVALS} value={approval} onChange={setApproval} />
        <CapField value={cap} onChange={setCap} isChecked={isChecked} />
        {make.error && <ErrorNote error={make.error} />}
      </form>
    </Dialog>
  )
}

interface CapFieldProps {
  value: string
  onChange: (value: string) => void
  isChecked: boolean
}

function CapField({ value, onChange, isChecked }: CapFieldProps) {
  return (
    <Field
      label={words.fleets.cap}
      hint={words.fleets.capHint}
      error={isChecked && capOf(value) === undefined && words.fleets.capWrong}
      inputMode="numeric"
      value={value}
      autoComplete="off"
      onChange={(event) => onChange(event.target.value)}
    />
  )
}

/** A command to copy. If its address works only on this machine, a note suggests another address. */
export function JoinCommand({ text }: { text: string }) {
  const address = loopbackAddressIn(text)
  return (
    <>
      <Code text={text} label={words.joinLabel} />
      {address && (
        <div className="note" role="note">
          <Icon name="warning" />
          <div className="note-text">
            <strong>{words.joinHere(address)}</strong>
            <span>{words.joinHereText(reachableAddress(address))}</span>
          </div>
        </div>
      )}
    </>
  )
}

interface JoinProps {
  fleets: readonly FleetAnswer[]
  first: FleetAnswer | null
  onClose: () => void
  onSecret: (fleet: FleetAnswer) => void
}

/** The commands that add a worker. They contain the secret only right after it was created. */
function Join({ fleets, first, onClose, onSecret }: JoinProps) {
  const [name, setName] = useState(fleetName(first ?? fleets[0] ?? { slug: "", stage: "" }))
  const fleet = fleets.find((fleet) => fleetName(fleet) === name)
  const details = useQuery<FleetDetails>(fleet ? fleetPath(fleet) : null, { freshSeconds: 10 })
  return (
    <Dialog
      open
      onClose={onClose}
      title={words.add}
      actions={
        <>
          {fleet && (
            <Button icon="key" onClick={() => onSecret(fleet)}>
              {words.newSecret}
            </Button>
          )}
          <Button kind="ink" onClick={onClose}>
            {common.close}
          </Button>
        </>
      }
    >
      {fleets.length > 1 && (
        <Select
          label={words.addTo}
          options={fleets.map((option) => ({ value: fleetName(option), label: fleetName(option) }))}
          value={name}
          onChange={setName}
        />
      )}
      <p className="dialog-text">{words.addText}</p>
      <Loaded query={details} skeleton={<Skeleton height="88px" />}>
        {(details) => <JoinCommand text={details.join} />}
      </Loaded>
      <p className="dialog-text">{words.addNoSecret}</p>
    </Dialog>
  )
}

function Assign({ fleet, onClose }: { fleet: FleetAnswer; onClose: () => void }) {
  const workflows = useQuery<Workflows>("/api/admin/workflows", { freshSeconds: 10 })
  const [chosen, setChosen] = useState<ReadonlySet<string>>(() => new Set(fleet.workflows))
  const name = fleetName(fleet)
  const assign = useAct(async () => {
    const path = `${fleetPath(fleet)}/workflows`
    const done = await api.put<AssignmentAnswer>(path, { workflow_slugs: [...chosen] })
    const [warning] = done.warnings
    toast({ title: words.fleets.assigned(name, done.workflows.length), ...(warning && { text: warning }) })
    readAgain()
    onClose()
  })
  const toggle = (slug: string) => {
    const next = new Set(chosen)
    if (!next.delete(slug)) next.add(slug)
    setChosen(next)
  }
  return (
    <Dialog
      open
      onClose={onClose}
      title={words.fleets.askAssign(name)}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="ink" busy={assign.isRunning} onClick={() => void assign.run()}>
            {words.fleets.assignAct}
          </Button>
        </>
      }
    >
      <p className="dialog-text">{words.fleets.assignText}</p>
      <Loaded query={workflows} skeleton={<Skeleton height="160px" />}>
        {(answer) =>
          answer.workflows.length === 0 ? (
            <Empty
              title={words.fleets.assignNone}
              act={<LinkButton href="/console/workflows">{words.fleets.assignNoneAct}</LinkButton>}
            />
          ) : (
            <ul className="fleets-choose">
              {answer.workflows.map(({ slug }) => (
                <li key={slug}>
                  <Check label={slug} checked={chosen.has(slug)} onChange={() => toggle(slug)} />
                </li>
              ))}
            </ul>
          )
        }
      </Loaded>
      {assign.error && <ErrorNote error={assign.error} />}
    </Dialog>
  )
}

function Settings({ fleet, onClose }: { fleet: FleetAnswer; onClose: () => void }) {
  const [approval, setApproval] = useState(fleet.approval === "manual" ? "manual" : "auto")
  const [cap, setCap] = useState(fleet.max_workers === null ? "" : String(fleet.max_workers))
  const [isChecked, setChecked] = useState(false)
  const name = fleetName(fleet)
  const save = useAct(async () => {
    const path = fleetPath(fleet)
    if (approval !== fleet.approval) await api.put(`${path}/approval`, { approval })
    const limit = capOf(cap) ?? null
    if (limit !== fleet.max_workers) await api.put(`${path}/cap`, { max_workers: limit })
    toast({ title: words.fleets.saved(name) })
    readAgain()
    onClose()
  })
  return (
    <Dialog
      open
      onClose={onClose}
      title={name}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="ink" type="submit" form="fleet-settings" busy={save.isRunning}>
            {common.save}
          </Button>
        </>
      }
    >
      <form
        id="fleet-settings"
        className="stack"
        noValidate
        onSubmit={(event) => {
          event.preventDefault()
          setChecked(true)
          if (capOf(cap) !== undefined) void save.run()
        }}
      >
        <Choices
          label={words.fleets.approval}
          options={APPROVALS}
          value={approval}
          onChange={(value) => setApproval(value)}
        />
        <CapField value={cap} onChange={setCap} isChecked={isChecked} />
        {save.error && <ErrorNote error={save.error} />}
      </form>
    </Dialog>
  )
}
