/** Settings for prompts from ComfyUI clients: whether a fleet runs them, their price and limits, and
 * which fleets a tenant may use. */

import { type FormEvent, type ReactNode, useState } from "react"
import { api, cache, useAct, useQuery, useRoleReason } from "@/api"
import type { FleetAnswer, FleetPromptsAnswer, Fleets, TenantPrompts } from "@/api/schema"
import { fleetName } from "@/pages/workers/machines"
import { FLEETS } from "@/pages/workers/useMachines"
import {
  Button,
  bytes,
  Check,
  Choices,
  Dialog,
  duration,
  ErrorNote,
  Field,
  Loaded,
  Skeleton,
  TextArea,
  toast,
} from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/prompts"
import { areNodeTypes, linesOf, type TypedTerms, termsOf, typedTerms, type WrongTerm } from "./prompts"

const PRICES = (["free", "each", "second"] as const).map((value) => ({ value, label: words.prices[value] }))

interface FrameProps {
  title: string
  isRunning: boolean
  onClose: () => void
  onSubmit: () => void
  children: ReactNode
}

function Frame({ title, isRunning, onClose, onSubmit, children }: FrameProps) {
  const offReason = useRoleReason("operator")
  const submit = (event: FormEvent) => {
    event.preventDefault()
    if (!offReason) onSubmit()
  }
  return (
    <Dialog
      open
      onClose={onClose}
      title={title}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="ink" type="submit" form="prompts" busy={isRunning} offReason={offReason}>
            {common.save}
          </Button>
        </>
      }
    >
      <form id="prompts" className="stack" noValidate onSubmit={submit}>
        {children}
      </form>
    </Dialog>
  )
}

interface OfFleet {
  fleet: FleetAnswer
  path: string
  onClose: () => void
}

export function FleetTerms({ fleet, path, onClose }: OfFleet) {
  const terms = useQuery<FleetPromptsAnswer>(`${path}/prompts`)
  const title = words.askFleet(fleetName(fleet))
  if (terms.data) return <TermsForm terms={terms.data} title={title} path={path} onClose={onClose} />
  return (
    <Dialog open onClose={onClose} title={title}>
      <Loaded query={terms} skeleton={<Skeleton height="320px" />}>
        {() => null}
      </Loaded>
    </Dialog>
  )
}

interface TermsFormProps {
  terms: FleetPromptsAnswer
  title: string
  path: string
  onClose: () => void
}

function TermsForm({ terms, title, path, onClose }: TermsFormProps) {
  const [typed, setTyped] = useState<TypedTerms>(() => typedTerms(terms))
  const [isChecked, setChecked] = useState(false)
  const [warning, setWarning] = useState(terms.warning)
  const result = termsOf(typed)
  const set = (change: Partial<TypedTerms>) => setTyped((before) => ({ ...before, ...change }))
  const wrong = (key: WrongTerm) =>
    isChecked && "wrong" in result && result.wrong.has(key) && words.wrong[key]
  const save = useAct(async () => {
    if ("wrong" in result) return
    const saved = await api.put<FleetPromptsAnswer>(`${path}/prompts`, result.terms)
    cache.invalidate(FLEETS)
    cache.set<FleetPromptsAnswer>(`${path}/prompts`, () => saved)
    toast({ title: words.saved })
    setWarning(saved.warning)
    if (!saved.warning) onClose()
  })
  const submit = () => {
    setChecked(true)
    if (!("wrong" in result)) void save.run()
  }
  const lines = (key: "allow" | "deny" | "passthrough") => (
    <TextArea
      label={words.fleet[key]}
      hint={words.fleet[`${key}Hint`]}
      error={wrong(key)}
      value={typed[key]}
      rows={2}
      spellCheck={false}
      className="mono"
      onChange={(event) => set({ [key]: event.target.value })}
    />
  )
  const number = (key: "nodes" | "bytes" | "seconds", hint?: string) => (
    <Field
      label={words.fleet[key]}
      hint={hint}
      error={wrong(key)}
      inputMode="numeric"
      autoComplete="off"
      value={typed[key]}
      onChange={(event) => set({ [key]: event.target.value })}
    />
  )
  return (
    <Frame title={title} isRunning={save.isRunning} onClose={onClose} onSubmit={submit}>
      <Check
        label={words.fleet.isOpen}
        checked={typed.isOpen}
        onChange={(event) => set({ isOpen: event.target.checked })}
      />
      <p className="dialog-text">{words.fleet.openText}</p>
      {warning && (
        <p className="dialog-text" role="alert">
          {warning}
        </p>
      )}
      <Choices
        label={words.fleet.price}
        options={PRICES}
        value={typed.priceKind}
        onChange={(priceKind) => set({ priceKind })}
      />
      {typed.priceKind !== "free" && (
        <Field
          label={words.tokensFor[typed.priceKind]}
          error={wrong("price")}
          inputMode="decimal"
          autoComplete="off"
          value={typed.price}
          onChange={(event) => set({ price: event.target.value })}
        />
      )}
      {lines("allow")}
      {lines("deny")}
      <Check
        label={words.fleet.allowsUnknown}
        checked={typed.allowsUnknown}
        onChange={(event) => set({ allowsUnknown: event.target.checked })}
      />
      <Check
        label={words.fleet.inOrder}
        checked={typed.inOrder}
        onChange={(event) => set({ inOrder: event.target.checked })}
      />
      {number("nodes")}
      {number("bytes", bytes(Number(typed.bytes) || 0))}
      {number("seconds", duration(Number(typed.seconds) || 0))}
      {lines("passthrough")}
      {save.error && <ErrorNote error={save.error} />}
    </Frame>
  )
}

interface OfTenant {
  terms: TenantPrompts
  path: string
  onClose: () => void
}

export function TenantTerms({ terms, path, onClose }: OfTenant) {
  const fleets = useQuery<Fleets>(FLEETS, { freshSeconds: 10 })
  const [isAny, setAny] = useState(terms.fleets === null)
  const [chosen, setChosen] = useState<ReadonlySet<string>>(() => new Set(terms.fleets))
  const [allow, setAllow] = useState(terms.allow.join("\n"))
  const [deny, setDeny] = useState(terms.deny.join("\n"))
  const [isChecked, setChecked] = useState(false)
  const isRight = areNodeTypes(allow) && areNodeTypes(deny)
  const save = useAct(async () => {
    const body: TenantPrompts = {
      fleets: isAny ? null : [...chosen],
      allow: linesOf(allow),
      deny: linesOf(deny),
    }
    await api.put<TenantPrompts>(`${path}/prompts`, body)
    cache.invalidate(path)
    toast({ title: words.saved })
    onClose()
  })
  const toggle = (name: string) => {
    const next = new Set(chosen)
    if (!next.delete(name)) next.add(name)
    setChosen(next)
  }
  const submit = () => {
    setChecked(true)
    if (isRight) void save.run()
  }
  return (
    <Frame title={words.askTenant} isRunning={save.isRunning} onClose={onClose} onSubmit={submit}>
      <Choices
        label={words.tenant.fleets}
        options={[
          { value: "any", label: words.tenant.any },
          { value: "some", label: words.tenant.some },
        ]}
        value={isAny ? "any" : "some"}
        onChange={(value) => setAny(value === "any")}
      />
      {!isAny && (
        <Loaded query={fleets} skeleton={<Skeleton height="72px" />}>
          {(answer) => (
            <ul className="fleets-choose">
              {answer.fleets.map(fleetName).map((name) => (
                <li key={name}>
                  <Check label={name} checked={chosen.has(name)} onChange={() => toggle(name)} />
                </li>
              ))}
            </ul>
          )}
        </Loaded>
      )}
      {!isAny && chosen.size === 0 && <p className="dialog-text">{words.tenant.noneText}</p>}
      <TextArea
        label={words.tenant.allow}
        hint={words.tenant.allowHint}
        error={isChecked && !areNodeTypes(allow) && words.wrong.allow}
        value={allow}
        rows={2}
        spellCheck={false}
        onChange={(event) => setAllow(event.target.value)}
      />
      <TextArea
        label={words.tenant.deny}
        hint={words.tenant.denyHint}
        error={isChecked && !areNodeTypes(deny) && words.wrong.deny}
        value={deny}
        rows={2}
        spellCheck={false}
        onChange={(event) => setDeny(event.target.value)}
      />
      {save.error && <ErrorNote error={save.error} />}
    </Frame>
  )
}
