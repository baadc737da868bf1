/** Creates a trigger: the work, its schedule or webhook, its inputs and its token limit. */

import { type ReactNode, useState } from "react"
import { api, useAct, useQuery } from "@/api"
import type { GraphPort, GraphPorts, MadeTrigger, ScheduleMoments } from "@/api/schema"
import { graphPath } from "@/app/reads"
import { Button, Check, Choices, Dialog, Empty, ErrorNote, Field, LinkButton, Select, TextArea } from "@/ui"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/triggers"
import { type Chosen, forget } from "../effect/Media"
import { OneFile, uploadedId } from "../effect/OneFile"
import { cronOf, DAYS, inputOf, inWords, momentIn, type Plan, RHYTHMS } from "./cron"
import type { Targets } from "./index"

interface NewTriggerProps {
  targets: Targets
  onClose: () => void
  onMade: (trigger: MadeTrigger) => void
}

const { form } = words
const MEDIA: ReadonlySet<string> = new Set(["image", "video", "audio", "file"])

interface Draft {
  readonly name: string
  /** The work to start, as graph:ID or pipeline:ID. */
  readonly target: string
  readonly version: string
  readonly base: string
  readonly kind: "schedule" | "webhook"
  readonly plan: Plan
  readonly cron: string
  readonly timezone: string
  readonly isCaughtUp: boolean
  readonly inputs: Readonly<Record<string, string>>
  /** Files for a schedule's inputs, by input name. */
  readonly files: Readonly<Record<string, Chosen | null>>
  readonly variables: string
  readonly tokens: string
  readonly perRun: string
}

function newDraft(): Draft {
  const plan: Plan = { rhythm: "daily", time: "02:30", day: "MON" }
  return {
    name: "",
    target: "",
    version: "",
    base: "8",
    kind: "schedule",
    plan,
    cron: cronOf(plan) ?? "",
    timezone: Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC",
    isCaughtUp: false,
    inputs: {},
    files: {},
    variables: "{}",
    tokens: "",
    perRun: "",
  }
}

interface PartProps {
  draft: Draft
  set: (change: Partial<Draft>) => void
  isChecked: boolean
}

export function NewTrigger({ targets, onClose, onMade }: NewTriggerProps) {
  const [draft, setDraft] = useState(newDraft)
  const [isChecked, setChecked] = useState(false)
  const set = (change: Partial<Draft>) => setDraft((before) => ({ ...before, ...change }))
  const [kind, id = ""] = draft.target.split(":")
  const version = draft.version === "" ? undefined : Number(draft.version)
  const ports = useQuery<GraphPorts>(kind === "graph" ? `${graphPath(id)}/ports` : null, {
    query: { version },
  })
  const inputs = ports.data?.inputs ?? []
  const wrong = problemsOf(draft, inputs)
  const make = useAct(async () => {
    const sent = await sentFiles(draft, inputs)
    const body = bodyOf({ ...draft, inputs: { ...draft.inputs, ...sent } }, inputs)
    onMade(await api.post<MadeTrigger>("/api/triggers", body))
  })
  const shared = { draft, set, isChecked }
  const isNothing = targets.graphs.length + targets.pipelines.length === 0
  if (isNothing)
    return (
      <Dialog open onClose={onClose} title={form.title}>
        <Empty title={form.nothing} act={<LinkButton href="/graphs">{form.draw}</LinkButton>} />
      </Dialog>
    )
  return (
    <Dialog
      open
      onClose={onClose}
      title={form.title}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" form="new-trigger" busy={make.isRunning}>
            {form.act}
          </Button>
        </>
      }
    >
      <form
        id="new-trigger"
        className="stack"
        noValidate
        onSubmit={(event) => {
          event.preventDefault()
          setChecked(true)
          if (Object.keys(wrong).length === 0) void make.run()
        }}
      >
        <Field
          label={form.name}
          hint={form.nameHint}
          error={isChecked && wrong.name}
          value={draft.name}
          maxLength={200}
          autoComplete="off"
          autoFocus
          onChange={(event) => set({ name: event.target.value })}
        />
        <TargetFields {...shared} targets={targets} wrong={wrong.target} />
        <Choices
          label={form.kind}
          options={[
            { value: "schedule", label: form.byKinds.schedule },
            { value: "webhook", label: form.byKinds.webhook },
          ]}
          value={draft.kind}
          onChange={(value) => set({ kind: value })}
        />
        {draft.kind === "schedule" && <ScheduleFields {...shared} />}
        {kind === "graph" && inputs.length > 0 && <InputFields {...shared} inputs={inputs} wrong={wrong} />}
        {kind === "pipeline" && (
          <TextArea
            label={form.variables}
            error={wrong.variables}
            value={draft.variables}
            spellCheck={false}
            onChange={(event) => set({ variables: event.target.value })}
          />
        )}
        <div className="triggers-pair">
          <Field
            label={form.tokens}
            hint={form.tokensHint}
            error={isChecked && wrong.tokens}
            type="number"
            min={0}
            inputMode="numeric"
            value={draft.tokens}
            onChange={(event) => set({ tokens: event.target.value })}
          />
          <Field
            label={form.perRun}
            hint={form.perRunHint}
            error={isChecked && wrong.perRun}
            type="number"
            min={0}
            inputMode="numeric"
            value={draft.perRun}
            onChange={(event) => set({ perRun: event.target.value })}
          />
        </div>
        {ports.error && <ErrorNote error={ports.error} onRetry={ports.reload} />}
        {make.error && <ErrorNote error={make.error} />}
      </form>
    </Dialog>
  )
}

interface TargetFieldsProps extends PartProps {
  targets: Targets
  wrong: string | undefined
}

function TargetFields({ draft, set, isChecked, targets, wrong }: TargetFieldsProps) {
  const [kind, id] = draft.target.split(":")
  const graph = kind === "graph" ? targets.graphs.find((graph) => graph.id === id) : undefined
  const versions = Array.from({ length: graph?.version ?? 0 }, (_, at) => String((graph?.version ?? 0) - at))
  return (
    <div className="triggers-pair">
      <Select
        label={form.target}
        error={isChecked && wrong}
        options={[
          ...(draft.target ? [] : [{ value: "", label: form.choose }]),
          ...targets.graphs.map((option) => ({ value: `graph:${option.id}`, label: option.name })),
          ...targets.pipelines.map((pipeline) => ({
            value: `pipeline:${pipeline.id}`,
            label: form.pipelineNamed(pipeline.name),
          })),
        ]}
        value={draft.target}
        onChange={(target) => set({ target, version: "", inputs: {}, files: {} })}
      />
      {graph && (
        <Select
          label={form.version}
          options={[
            { value: "", label: form.newest },
            ...versions.map((version) => ({ value: version, label: version })),
          ]}
          value={draft.version}
          onChange={(version) => set({ version })}
        />
      )}
      {kind === "pipeline" && (
        <Field
          label={form.base}
          type="number"
          min={1}
          value={draft.base}
          onChange={(event) => set({ base: event.target.value })}
        />
      )}
    </div>
  )
}

function ScheduleFields({ draft, set }: PartProps) {
  const { plan, cron, timezone } = draft
  const isWhole = cron.trim().split(/\s+/).length === 5
  const preview = useQuery<ScheduleMoments>(isWhole ? "/api/triggers/moments" : null, {
    query: { cron: cron.trim(), timezone },
    freshSeconds: 30,
  })
  const choose = (change: Partial<Plan>) => {
    const next = { ...plan, ...change }
    set({ plan: next, cron: cronOf(next) ?? cron })
  }
  const isOwn = plan.rhythm === "own"
  const message = preview.error?.message
  const wrongZone = preview.error?.details.field === "timezone" ? form.noZone(timezone) : undefined
  const wrong = isWhole ? (wrongZone ? undefined : message) : form.cronHint
  return (
    <>
      <div className="triggers-pair">
        <Select
          label={form.rhythm}
          options={RHYTHMS.map((value) => ({ value, label: words.rhythms[value] }))}
          value={plan.rhythm}
          onChange={(rhythm) => choose({ rhythm })}
        />
        {plan.rhythm === "weekly" && (
          <Select
            label={form.day}
            options={DAYS.map((value) => ({ value, label: words.days[value] ?? value }))}
            value={plan.day}
            onChange={(day) => choose({ day })}
          />
        )}
        {!isOwn && (
          <Field
            label={form.time}
            type="time"
            value={plan.time}
            onChange={(event) => event.target.value && choose({ time: event.target.value })}
          />
        )}
      </div>
      <div className="triggers-pair">
        <Field
          label={form.cron}
          hint={isOwn && !wrong ? form.cronHint : undefined}
          error={wrong}
          className="mono"
          value={cron}
          maxLength={100}
          spellCheck={false}
          onChange={(event) => set({ cron: event.target.value, plan: { ...plan, rhythm: "own" } })}
        />
        <Zone draft={draft} set={set} wrong={wrongZone} />
      </div>
      {preview.data && !message && !wrong && (
        <div role="status">
          <p className="triggers-told">{inWords(cron)}</p>
          <ol className="triggers-moments" aria-label={form.moments}>
            {preview.data.moments.map((moment) => (
              <li key={moment}>{momentIn(moment, timezone)}</li>
            ))}
          </ol>
        </div>
      )}
      <Check
        label={form.catchUp}
        checked={draft.isCaughtUp}
        onChange={(event) => set({ isCaughtUp: event.target.checked })}
      />
    </>
  )
}

interface ZoneProps extends Pick<PartProps, "draft" | "set"> {
  wrong: string | undefined
}

function Zone({ draft, set, wrong }: ZoneProps): ReactNode {
  return (
    <>
      <Field
        label={form.timezone}
        error={wrong}
        list="triggers-zones"
        value={draft.timezone}
        spellCheck={false}
        onChange={(event) => set({ timezone: event.target.value })}
      />
      <datalist id="triggers-zones">
        {Intl.supportedValuesOf("timeZone").map((zone) => (
          <option key={zone} value={zone} />
        ))}
      </datalist>
    </>
  )
}

interface InputFieldsProps extends PartProps {
  inputs: readonly GraphPort[]
  wrong: Problems
}

function InputFields({ draft, set, isChecked, inputs, wrong }: InputFieldsProps) {
  const isWebhook = draft.kind === "webhook"
  return (
    <fieldset className="triggers-inputs">
      <legend>{form.inputs}</legend>
      {isWebhook && <p className="faint">{form.bodyHint}</p>}
      {inputs.map(({ name, type }) =>
        isFile(draft, type) ? (
          <OneFile
            key={name}
            label={name}
            kind={type}
            chosen={draft.files[name] ?? null}
            onChange={(chosen) => {
              forget(draft.files[name] ?? null)
              set({ files: { ...draft.files, [name]: chosen } })
            }}
            error={(isChecked && wrong[`input ${name}`]) || null}
          />
        ) : (
          <Field
            key={name}
            label={name}
            hint={isWebhook ? type : form.inputHint(type)}
            error={isChecked && wrong[`input ${name}`]}
            placeholder={isWebhook ? `body.${name}` : undefined}
            value={draft.inputs[name] ?? ""}
            spellCheck={false}
            onChange={(event) => set({ inputs: { ...draft.inputs, [name]: event.target.value } })}
          />
        ),
      )}
    </fieldset>
  )
}

type Problems = Readonly<Record<string, string | undefined>>

function problemsOf(draft: Draft, inputs: readonly GraphPort[]): Problems {
  const mistakes: Record<string, string> = {}
  if (draft.name.trim() === "") mistakes.name = form.nameMissing
  if (draft.target === "") mistakes.target = form.targetMissing
  if (draft.tokens === "") mistakes.tokens = form.tokensMissing
  if (draft.target.startsWith("pipeline:") && !isObject(draft.variables)) mistakes.variables = form.notJson
  for (const amount of ["tokens", "perRun"] as const)
    if (draft[amount] !== "" && !/^\d+$/.test(draft[amount])) mistakes[amount] = form.tokensWrong
  for (const { name, type, required } of inputs)
    if (required && !isFilled(draft, name, type)) mistakes[`input ${name}`] = form.missing(name)
  return mistakes
}

/** Only schedules have files here. A webhook's files come with its requests. */
function isFile({ kind }: Draft, type: string): boolean {
  return kind === "schedule" && MEDIA.has(type)
}

function isFilled(draft: Draft, name: string, type: string): boolean {
  return isFile(draft, type) ? Boolean(draft.files[name]) : Boolean(draft.inputs[name]?.trim())
}

/** Waits for uploads and returns the media ids by input name. */
async function sentFiles(draft: Draft, inputs: readonly GraphPort[]): Promise<Record<string, string>> {
  const sent: Record<string, string> = {}
  for (const { name, type } of inputs) {
    const chosen = draft.files[name]
    if (chosen && isFile(draft, type)) sent[name] = await uploadedId(chosen, form.missing(name))
  }
  return sent
}

function isObject(text: string): boolean {
  const value = inputOf(text)
  return typeof value === "object" && value !== null && !Array.isArray(value)
}

function bodyOf(draft: Draft, inputs: readonly GraphPort[]) {
  const [kind, id] = draft.target.split(":")
  const isGraph = kind === "graph"
  const filled = inputs.flatMap(({ name, type }) => {
    const text = draft.inputs[name]?.trim() ?? ""
    return text === "" ? [] : [[name, type === "text" ? text : inputOf(text)] as const]
  })
  return {
    name: draft.name.trim(),
    graph: isGraph ? id : undefined,
    version: isGraph && draft.version !== "" ? Number(draft.version) : undefined,
    pipeline: isGraph ? undefined : id,
    base_candidates: isGraph ? undefined : Number(draft.base),
    inputs: isGraph ? Object.fromEntries(filled) : inputOf(draft.variables),
    cron: draft.kind === "schedule" ? draft.cron.trim() : undefined,
    timezone: draft.timezone,
    catch_up: draft.kind === "schedule" && draft.isCaughtUp,
    tokens_per_day: Number(draft.tokens),
    max_tokens: draft.perRun === "" ? undefined : Number(draft.perRun),
  }
}
