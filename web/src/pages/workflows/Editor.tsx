/** Edits a workflow before it is registered: its drawing, and the inputs that customers may set. */

import { useEffect, useMemo, useState } from "react"
import { useLocation } from "wouter"
import { type ApiError, api, cache, useAct, useQuery } from "@/api"
import type {
  NewWorkflow,
  PropertyAnswer,
  RegisteredVersion,
  SuggestedProperty,
  WorkflowInspection,
  Workflows,
} from "@/api/schema"
import { Button, Check, Confirm, ErrorNote, Field, Icon, Page, Select, StateIcon, toast } from "@/ui"
import { words } from "@/words/en/workflows"
import { Drawing } from "./Drawing"
import { type Opened, useDropped } from "./Drop"
import { bodyOf, carriedOver, type Exposed, exposedOf, isSlug, mistakesOf, moved, slugOf } from "./draft"
import { type Draft, draftOf, keepDraft } from "./drafts"
import { cut, topNode, valueText } from "./layout"
import { PropertyForm } from "./PropertyForm"
import { useLeaveWarning } from "./useLeaveWarning"

export interface Base {
  slug: string
  properties: readonly PropertyAnswer[]
  outputNode: string | null
}

interface EditorProps {
  opened: Opened
  /** The workflow that gets the new version. Null means that the user may choose any. */
  base: Base | null
  onDiscard: () => void
  onRegistered?: () => void
}

export function Editor({ opened, base, onDiscard, onRegistered }: EditorProps) {
  const { inspection, name } = opened
  const of = base?.slug ?? ""
  const [before] = useState(() => (draftOf(of)?.opened === opened ? draftOf(of) : null))
  const { exposed, lost, toggle, change, setExposed } = useExposed(inspection, base, before)
  const [slug, setSlug] = useState(before?.slug ?? base?.slug ?? slugOf(name))
  const [output, setOutput] = useState(before?.output ?? base?.outputNode ?? "")
  useEffect(() => keepDraft(of, { opened, exposed, slug, output }), [of, opened, exposed, slug, output])
  const [node, setNode] = useState<string | null>(null)
  const [open, setOpen] = useState<string | null>(null)
  const [isTried, setTried] = useState(false)
  const [isDialogOpen, setDialogOpen] = useState(false)
  const bindings = useMemo(() => new Set(exposed.map((property) => property.binding ?? "")), [exposed])
  const mistakes = mistakesOf(exposed)
  const isReady = Object.keys(mistakes).length === 0 && isSlug(slug)
  const register = useRegister(inspection, exposed, slug, output, () => {
    keepDraft(of, null)
    onRegistered?.()
  })
  useLeaveWarning(true)
  // Refuses dropped files with a message. Otherwise, the browser would leave the page to open them.
  useDropped((file) =>
    toast({ title: words.oneAtATime, text: words.discardFirst(file.name), state: "cancelled" }),
  )
  const flip = (property: SuggestedProperty) => {
    setOpen(bindings.has(property.binding) ? null : property.binding)
    toggle(property)
  }
  const submit = (way: Way) => {
    setTried(true)
    if (isReady) void register.run(way)
  }
  const title = base ? words.newVersion(base.slug) : words.newTitle
  return (
    <Page
      title={title}
      fill
      className="workflows-editor"
      aside={
        <span className="quiet">
          {name}{" "}
          <span className="mono faint">
            {words.fromFile(inspection.file_kind, inspection.drawing.nodes.length)}
          </span>
        </span>
      }
      actions={
        <>
          <Button kind="ghost" onClick={() => setDialogOpen(true)}>
            {words.discard}
          </Button>
          <Button icon="play" busy={register.isRunning} onClick={() => submit("try")}>
            {words.tryFirst}
          </Button>
          <Button kind="go" busy={register.isRunning} onClick={() => submit("use")}>
            {base ? words.registerVersion : words.register}
          </Button>
        </>
      }
    >
      {register.error && <Refusal error={register.error} onForce={() => submit("force")} />}
      <div className="workflows-split">
        <Drawing
          wheel
          drawing={inspection.drawing}
          properties={inspection.properties}
          exposed={bindings}
          selected={node}
          focus={open?.split(/[.:]/)[0]}
          onNode={(id) => setNode((before) => (before === id ? null : id))}
          onInput={flip}
        />
        <div className="workflows-side">
          <Troubles inspection={inspection} bindings={bindings} lost={lost} />
          {!base && <SlugField slug={slug} onChange={setSlug} isTried={isTried} />}
          <section className="stack" aria-label={words.exposed}>
            <h2>
              {words.exposed} <span className="badge">{exposed.length}</span>
            </h2>
            {exposed.length === 0 && <p className="quiet">{words.exposedNone}</p>}
            <ul className="workflows-properties">
              {exposed.map((property, place) => (
                <PropertyForm
                  key={property.key}
                  property={property}
                  suggested={inspection.properties.find((one) => one.binding === property.binding)}
                  error={mistakes[property.key] ?? errorOf(register.error, property)}
                  isOpen={open === property.key}
                  isFirst={place === 0}
                  isLast={place === exposed.length - 1}
                  onToggle={() => setOpen((before) => (before === property.key ? null : property.key))}
                  onChange={(changes) => change(property.key, changes)}
                  onMove={(by) => setExposed((before) => moved(before, place, by))}
                  onRemove={() => setExposed((before) => before.filter((one) => one.key !== property.key))}
                />
              ))}
            </ul>
            {isTried && Object.keys(mistakes).length > 0 && (
              <p className="field-error" role="alert">
                {words.mend}
              </p>
            )}
          </section>
          <Inputs inspection={inspection} bindings={bindings} node={node} onNode={setNode} onInput={flip} />
          <Outputs inspection={inspection} value={output} onChange={setOutput} />
        </div>
      </div>
      <Confirm
        open={isDialogOpen}
        onClose={() => setDialogOpen(false)}
        title={words.askDiscard}
        act={words.actDiscard}
        onConfirm={async () => {
          keepDraft(of, null)
          onDiscard()
        }}
      >
        {words.askDiscardText}
      </Confirm>
    </Page>
  )
}

function useExposed(inspection: WorkflowInspection, base: Base | null, before: Draft | null) {
  const [start] = useState(() => carriedOver(base?.properties ?? [], inspection.properties))
  const [exposed, setExposed] = useState<readonly Exposed[]>(before?.exposed ?? start.kept)
  const toggle = (property: SuggestedProperty) =>
    setExposed((before) => {
      const rest = before.filter((other) => other.binding !== property.binding)
      if (rest.length < before.length) return rest
      return [...before, exposedOf(property, new Set(before.map((other) => other.name)))]
    })
  const change = (key: string, changes: Partial<Exposed>) =>
    setExposed((before) =>
      before.map((property) => (property.key === key ? { ...property, ...changes } : property)),
    )
  return { exposed, lost: start.lost, toggle, change, setExposed }
}

/** Whether new jobs use the version immediately, use it even if it breaks effects, or keep the
 * current version while this one is tested. */
type Way = "use" | "force" | "try"

function useRegister(
  inspection: WorkflowInspection,
  exposed: readonly Exposed[],
  slug: string,
  output: string,
  onRegistered: () => void,
) {
  const [, go] = useLocation()
  return useAct(async (way: Way) => {
    const of = new Map(inspection.properties.map((property) => [property.binding, property]))
    const body: NewWorkflow = {
      slug,
      document: inspection.document,
      properties: exposed.map((property) => bodyOf(property, of.get(property.binding ?? ""))),
      output_node_id: output || null,
      break_effects: way === "force",
      is_draft: way === "try",
    }
    const version = await api.post<RegisteredVersion>("/api/admin/workflows", body)
    cache.invalidate("/api/admin/workflows")
    cache.invalidate("/api/admin/effects")
    toast({ title: words.registered(version.slug, version.version) })
    const part = way === "try" ? `?part=test&version=${version.version}` : ""
    go(`/console/workflows/${version.slug}${part}`, {
      state: { warnings: [...version.warnings, ...version.notes] },
    })
    onRegistered()
  })
}

function errorOf(error: ApiError | null, property: Exposed): string | null {
  return error?.details.property === property.name ? error.message : null
}

/** Shows the API's refusal. If the new version would break effects, the operator may still go
 * ahead. */
export function Refusal({ error, onForce }: { error: ApiError; onForce: () => void }) {
  const isBreaking = error.status === 409 && Array.isArray(error.details.effects)
  return (
    <ErrorNote error={error}>
      {isBreaking && (
        <Button size="small" onClick={onForce}>
          {words.registerAnyway}
        </Button>
      )}
    </ErrorNote>
  )
}

interface TroublesProps {
  inspection: WorkflowInspection
  bindings: ReadonlySet<string>
  lost: readonly string[]
}

function Troubles({ inspection, bindings, lost }: TroublesProps) {
  // Files that are chosen by customers don't count as missing.
  const setByCustomers = new Set(
    inspection.properties
      .filter((property) => bindings.has(property.binding))
      .map((property) => property.value),
  )
  const missing = [
    ...(inspection.missing?.node_types ?? []),
    ...(inspection.missing?.files ?? []).filter((file) => !setByCustomers.has(file)),
  ]
  const lines = [
    ...(lost.length > 0 ? [words.lost(lost.join(", "))] : []),
    ...(missing.length > 0 ? [words.missing(missing.join(", "))] : []),
    ...inspection.notes,
  ]
  if (lines.length === 0) return null
  return (
    <div className="note note-bad" role="note">
      <StateIcon state="failed" />
      <div className="note-text">
        {missing.length > 0 && <strong>{words.missingTitle}</strong>}
        {lines.map((line) => (
          <span key={line}>{line}</span>
        ))}
      </div>
    </div>
  )
}

function SlugField({
  slug,
  onChange,
  isTried,
}: {
  slug: string
  onChange: (slug: string) => void
  isTried: boolean
}) {
  const list = useQuery<Workflows>("/api/admin/workflows", { freshSeconds: 10 }).data?.workflows
  const same = list?.find((workflow) => workflow.slug === slug)
  return (
    <Field
      label={words.slug}
      className="mono"
      value={slug}
      hint={same ? words.slugTaken(same.version + 1) : words.slugHint}
      error={(isTried || slug !== "") && !isSlug(slug) ? words.badSlug : null}
      onChange={(event) => onChange(event.target.value)}
    />
  )
}

const INPUTS_MAX = 60

interface InputsProps {
  inspection: WorkflowInspection
  bindings: ReadonlySet<string>
  node: string | null
  onNode: (node: string | null) => void
  onInput: (property: SuggestedProperty) => void
}

/** Lists all inputs that can be exposed, or only those of the node selected in the drawing. */
function Inputs({ inspection, bindings, node, onNode, onInput }: InputsProps) {
  const [text, setText] = useState("")
  const query = text.toLocaleLowerCase().trim()
  const fitting = inspection.properties.filter(
    (property) =>
      (node === null || topNode(property) === node) &&
      `${property.node_title} ${property.path.join(" ")} ${property.input}`
        .toLocaleLowerCase()
        .includes(query),
  )
  const title = inspection.drawing.nodes.find((item) => item.id === node)?.title ?? ""
  return (
    <section className="stack" aria-label={words.inputs}>
      <h2>
        {words.inputs} <span className="badge">{inspection.properties.length}</span>
      </h2>
      <Field
        label={words.findInput}
        hideLabel
        icon="search"
        type="search"
        placeholder={words.findInput}
        value={text}
        onChange={(event) => setText(event.target.value)}
      />
      {node !== null && (
        <span className="chips">
          <button
            type="button"
            className="chip"
            aria-label={words.showAllInputs}
            onClick={() => onNode(null)}
          >
            {words.onlyNode(cut(title, 30))}
            <Icon name="cross" size={12} />
          </button>
        </span>
      )}
      {fitting.length === 0 && <p className="quiet">{node && !query ? words.noInputs : words.noInput}</p>}
      <ul className="workflows-inputs">
        {fitting.slice(0, INPUTS_MAX).map((property) => (
          <li key={property.binding}>
            <Check
              label={
                <>
                  <span className="workflows-input-name">{property.input}</span>{" "}
                  <span className="faint">
                    {[...property.path, property.node_title].join(" › ")} {property.node_id}
                  </span>
                </>
              }
              checked={bindings.has(property.binding)}
              onChange={() => onInput(property)}
            />
            <span className="mono faint cut-text">{cut(valueText(property.value), 40)}</span>
          </li>
        ))}
      </ul>
      {fitting.length > INPUTS_MAX && (
        <p className="faint">{words.moreInputs(fitting.length - INPUTS_MAX)}</p>
      )}
    </section>
  )
}

function Outputs({
  inspection,
  value,
  onChange,
}: {
  inspection: WorkflowInspection
  value: string
  onChange: (node: string) => void
}) {
  if (inspection.outputs.length < 2 && !value) return null
  const options = [
    { value: "", label: words.resultAll },
    ...inspection.outputs.map((output) => ({
      value: output.node_id,
      label: `${output.title} (${output.media}${output.is_saved ? "" : `, ${words.notSaved}`})`,
    })),
  ]
  return (
    <Select
      label={words.result}
      hint={words.resultHint}
      options={options}
      value={value}
      onChange={onChange}
    />
  )
}

/** Offers to continue an unfinished draft that the operator has left. */
export function Unfinished({ of, onOpened }: { of: string; onOpened: (opened: Opened) => void }) {
  const [draft, setDraft] = useState(() => draftOf(of))
  if (!draft) return null
  return (
    <div className="note workflows-unfinished" role="note">
      <Icon name="edit" />
      <div className="note-text">
        <strong>{words.unfinished(draft.opened.name)}</strong>
        <span>{words.unfinishedText(draft.exposed.length)}</span>
      </div>
      <div className="note-acts">
        <Button
          kind="ghost"
          size="small"
          onClick={() => {
            keepDraft(of, null)
            setDraft(null)
          }}
        >
          {words.discard}
        </Button>
        <Button size="small" onClick={() => onOpened(draft.opened)}>
          {words.goOn}
        </Button>
      </div>
    </div>
  )
}
