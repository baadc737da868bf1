/** The settings of one node. Everything that the mouse does with wires can be done here by keyboard, too. */

import { useState } from "react"
import type { OfferedProperty, ProblemSeen, WorkerSeen, WorkflowOffer } from "@/api/schema"
import { Button, Check, Choices, duration, Field, Select, TextArea, tokens } from "@/ui"
import { words } from "@/words/en/canvas"
import { OneField } from "../effect/Fields"
import type { FormField, Kind } from "../effect/form"
import {
  addNode,
  connect,
  disconnect,
  freeId,
  type GraphDocument,
  type GraphNode,
  ID_PATTERN,
  propertiesOf,
  rename,
  setFields,
  setProperty,
} from "./document"
import { type GraphTypes, MEDIA, type Port, propertyOf, VALUE_TYPES } from "./types"

interface NodePanelProps {
  document: GraphDocument
  node: GraphNode
  types: GraphTypes
  offer: WorkflowOffer | undefined
  backends: readonly WorkerSeen[]
  problems: readonly ProblemSeen[]
  onChange: (document: GraphDocument, tag: string | null) => void
  onRename: (document: GraphDocument, before: string, after: string) => void
  onClose: () => void
  onDelete: () => void
  onDuplicate: () => void
}

export function NodePanel(props: NodePanelProps) {
  const { node, offer, onClose, onDelete, onDuplicate } = props
  return (
    <aside className="canvas-side canvas-panel" aria-label={words.panel(node.id)}>
      <div className="row">
        <h2 className="cut-text">{offer?.name ?? words.kinds[node.type]}</h2>
        {offer && <span className="badge">v{offer.version}</span>}
        <Button
          kind="ghost"
          size="small"
          icon="cross"
          label={words.closePanel}
          className="row-end"
          onClick={onClose}
        />
      </div>
      <IdField key={node.id} {...props} />
      <KindFields {...props} />
      <div className="row">
        <Button size="small" icon="copy" onClick={onDuplicate}>
          {words.duplicate}
        </Button>
        <Button size="small" kind="stop" icon="trash" onClick={onDelete}>
          {words.deleteNode}
        </Button>
      </div>
      {offer && <Facts offer={offer} />}
    </aside>
  )
}

function IdField({ document, node, onRename }: NodePanelProps) {
  const [text, setText] = useState(node.id)
  const isTaken = text !== node.id && document.nodes.some((each) => each.id === text)
  const wrong = !ID_PATTERN.test(text) ? words.idWrong : isTaken ? words.idTaken : null
  const keep = () => {
    if (!wrong && text !== node.id) onRename(rename(document, node.id, text), node.id, text)
  }
  return (
    <Field
      label={words.idField}
      value={text}
      error={wrong}
      onChange={(event) => setText(event.target.value)}
      onBlur={keep}
      onKeyDown={(event) => event.key === "Enter" && keep()}
    />
  )
}

function KindFields(props: NodePanelProps) {
  const { node, types } = props
  if (node.type === "input") return <InputFields {...props} />
  const ports = types.ports(node).inputs
  if (node.type === "workflow") return <WorkflowFields {...props} ports={ports} />
  return (
    <>
      {node.type === "condition" && <ConditionField {...props} />}
      {node.type === "fanout" && <FanOutFields {...props} />}
      {node.type === "merge" && <MergeFields {...props} />}
      {(OWN_FIELDS[node.type] ?? []).map((each) => (
        <OwnField key={`${node.id} ${each.name}`} {...props} {...each} />
      ))}
      {ports.map((each) => (
        <Wire key={each.name} {...props} port={each} label={`${words.wiredFrom}: ${each.name}`} />
      ))}
    </>
  )
}

/** Changes a field; letters typed into one field are one step back. */
function useSet({ document, node, onChange }: NodePanelProps) {
  return (fields: Record<string, unknown>) =>
    onChange(setFields(document, node.id, fields), `${node.id}.${Object.keys(fields).join()}`)
}

const TYPES = VALUE_TYPES.map((each) => ({ value: each as string, label: each as string }))

function InputFields(props: NodePanelProps) {
  const set = useSet(props)
  const type = String(props.node.value_type ?? "any")
  const isMedia = MEDIA.has(type.replace("[]", ""))
  const told = props.node.default
  const isRequired = props.node.required !== false && told === undefined
  return (
    <>
      <Select
        label={words.valueType}
        options={TYPES.some((each) => each.value === type) ? TYPES : [...TYPES, { value: type, label: type }]}
        value={type}
        onChange={(value) => set({ value_type: value === "any" ? undefined : value, default: undefined })}
      />
      {!isMedia && (
        <Field
          label={words.default}
          value={told === undefined ? "" : typeof told === "string" ? told : JSON.stringify(told)}
          onChange={(event) => set({ default: typedValue(event.target.value, type), required: undefined })}
        />
      )}
      <Check
        label={words.required}
        checked={isRequired}
        onChange={(event) => set({ required: event.target.checked ? undefined : false })}
      />
    </>
  )
}

/** What was typed, as the type wants it. */
export function typedValue(text: string, type: string): unknown {
  if (text === "") return undefined
  if (type === "text" || type === "choice") return text
  try {
    return JSON.parse(text) as unknown
  } catch {
    return text
  }
}

const FIELDS = [
  "output.width",
  "output.height",
  "output.images.count",
  "output.text",
  "output.json",
  "output.values",
]

function ConditionField(props: NodePanelProps) {
  const set = useSet(props)
  const text = String(props.node.condition ?? "")
  const wrong = props.problems.find((each) => each.port === "condition")
  const at = wrong && Number(/\(character (\d+)\)/.exec(wrong.message)?.[1])
  return (
    <div className="canvas-expression">
      <TextArea
        label={words.condition}
        hint={words.conditionHint}
        error={wrong?.message}
        value={text}
        spellCheck={false}
        onChange={(event) => set({ condition: event.target.value })}
      />
      {at ? (
        <pre className="canvas-mistake" aria-hidden="true">
          {text.slice(0, at - 1)}
          <mark>{text.slice(at - 1, at) || " "}</mark>
          {text.slice(at)}
        </pre>
      ) : null}
      <ul className="canvas-fields" aria-label={words.conditionFields}>
        {FIELDS.map((each) => (
          <li key={each}>
            <button
              type="button"
              className="chip mono"
              aria-label={words.insert(each)}
              onClick={() => set({ condition: `${text}${text && !text.endsWith(" ") ? " " : ""}${each}` })}
            >
              {each.replace("output.", "")}
            </button>
          </li>
        ))}
      </ul>
    </div>
  )
}

function FanOutFields(props: NodePanelProps) {
  const set = useSet(props)
  const { node } = props
  const mode = node.mode === "distribute" ? "distribute" : "broadcast"
  return (
    <>
      <Choices
        label={words.mode}
        options={[
          { value: "broadcast", label: words.fanModes.broadcast },
          { value: "distribute", label: words.fanModes.distribute },
        ]}
        value={mode}
        onChange={(value) =>
          set({ mode: value === "distribute" ? value : undefined, per_item: undefined, max_items: undefined })
        }
      />
      {mode === "distribute" && (
        <Check
          label={words.perItem}
          checked={node.per_item === true}
          onChange={(event) => set({ per_item: event.target.checked || undefined })}
        />
      )}
      {!node.per_item && (
        <NumberField {...props} field="output_count" label={words.outputCount} usual={2} least={1} />
      )}
      {mode === "distribute" && (
        <NumberField {...props} field="max_items" label={words.maxItems} usual={100} least={1} />
      )}
    </>
  )
}

function MergeFields(props: NodePanelProps) {
  const set = useSet(props)
  const { node, document } = props
  const fans = document.nodes.filter((each) => each.type === "fanout" && each.per_item === true)
  return (
    <>
      <Choices
        label={words.mode}
        options={[
          { value: "collect", label: words.mergeModes.collect },
          { value: "concat_images", label: words.mergeModes.concat_images },
        ]}
        value={node.mode === "concat_images" ? "concat_images" : "collect"}
        onChange={(value) => set({ mode: value === "collect" ? undefined : value })}
      />
      <Select
        label={words.over}
        options={[
          { value: "", label: words.overNone },
          ...fans.map((each) => ({ value: each.id, label: each.id })),
        ]}
        value={String(node.over ?? "")}
        onChange={(value) => set({ over: value || undefined })}
      />
    </>
  )
}

interface OwnFieldFacts {
  name: string
  kind: "text" | "number" | "truth" | "json"
}

const field = (kind: OwnFieldFacts["kind"], ...names: string[]): OwnFieldFacts[] =>
  names.map((name) => ({ name, kind }))

/** What nodes that decide are made of, as the document has it. */
const OWN_FIELDS: Partial<Record<GraphNode["type"], readonly OwnFieldFacts[]>> = {
  value: field("json", "values"),
  switch: field("json", "cases"),
  approve: [
    ...field("text", "message"),
    ...field("truth", "pick"),
    ...field("number", "deadline"),
    ...field("text", "on_deadline"),
  ],
  map: [
    ...field("text", "over"),
    ...field("json", "do"),
    ...field("number", "at_once", "max_items"),
    ...field("truth", "continue_on_error"),
  ],
  loop: [...field("json", "start", "do"), ...field("text", "until", "best"), ...field("number", "at_most")],
  graph: [...field("text", "graph"), ...field("number", "version"), ...field("json", "inputs")],
  score: [
    ...field("text", "over", "measure", "workflow", "property", "score"),
    ...field("json", "properties"),
    ...field("number", "keep", "at_once"),
  ],
}

function OwnField({ name, kind, ...props }: NodePanelProps & OwnFieldFacts) {
  const set = useSet(props)
  const label = words.ownFields[name] ?? name
  const error = props.problems.find((each) => each.port === name)?.message
  const value = props.node[name]
  if (kind === "number") return <NumberField {...props} field={name} label={label} least={1} />
  if (kind === "truth")
    return (
      <Check
        label={label}
        checked={value === true}
        onChange={(event) => set({ [name]: event.target.checked || undefined })}
      />
    )
  if (kind === "json")
    return <JsonField {...{ label, error, value }} onChange={(next) => set({ [name]: next })} />
  return (
    <Field
      label={label}
      error={error}
      value={value === undefined ? "" : String(value)}
      spellCheck={false}
      onChange={(event) => set({ [name]: event.target.value || undefined })}
    />
  )
}

interface JsonFieldProps {
  label: string
  error: string | undefined
  value: unknown
  onChange: (value: unknown) => void
}

/** Taken over as soon as it can be read. */
function JsonField({ label, error, value, onChange }: JsonFieldProps) {
  const [text, setText] = useState(value === undefined ? "" : JSON.stringify(value, null, 2))
  const [isBroken, setBroken] = useState(false)
  return (
    <TextArea
      label={label}
      error={isBroken ? words.notJson : error}
      value={text}
      rows={Math.min(16, text.split("\n").length + 1)}
      spellCheck={false}
      onChange={(event) => {
        setText(event.target.value)
        try {
          onChange(event.target.value.trim() === "" ? undefined : JSON.parse(event.target.value))
          setBroken(false)
        } catch {
          setBroken(true)
        }
      }}
    />
  )
}

interface NumberFieldProps extends NodePanelProps {
  field: string
  label: string
  usual?: number
  least: number
}

function NumberField({ field, label, usual, least, ...props }: NumberFieldProps) {
  const set = useSet(props)
  const value = props.node[field] ?? usual
  return (
    <Field
      label={label}
      type="number"
      min={least}
      step={1}
      value={value === undefined ? "" : String(value)}
      error={props.problems.find((each) => each.port === field)?.message}
      onChange={(event) => {
        const given = event.target.value === "" ? undefined : Number(event.target.value)
        set({ [field]: given === usual ? undefined : given })
      }}
    />
  )
}

const FALLBACKS = (["none", "ask_user", "auto_select"] as const).map((value) => ({
  value,
  label: words.fallbacks[value],
}))

const REUSES = (["graph", "yes", "no"] as const).map((value) => ({ value, label: words.reuses[value] }))

function WorkflowFields({ ports, ...props }: NodePanelProps & { ports: readonly Port[] }) {
  const { node, offer, backends, problems } = props
  const set = useSet(props)
  const strategy = (node.fallback_strategy ?? "none") as "none" | "ask_user" | "auto_select"
  return (
    <>
      {ports.map((each) => (
        <PropertyField key={each.name} {...props} port={each} property={propertyOf(offer, each.name)} />
      ))}
      <Field
        label={words.runsOn}
        hint={words.runsOnHint}
        error={problems.find((each) => each.port === "backend_affinity")?.message}
        value={String(node.backend_affinity ?? "")}
        placeholder={words.anyWorker}
        list="canvas-affinities"
        onChange={(event) => set({ backend_affinity: event.target.value.trim() || undefined })}
      />
      <datalist id="canvas-affinities">
        {affinitiesOf(backends).map((each) => (
          <option key={each} value={each} />
        ))}
      </datalist>
      <Choices
        label={words.fallback}
        options={FALLBACKS}
        value={strategy}
        onChange={(value) => set({ fallback_strategy: value === "none" ? undefined : value })}
      />
      <details className="canvas-more">
        <summary>{words.moreSettings}</summary>
        <NumberField {...props} field="retries" label={words.retries} usual={0} least={0} />
        <NumberField {...props} field="timeout" label={words.timeout} least={1} />
        <NumberField {...props} field="priority" label={words.priority} usual={0} least={-1000} />
        <Check
          label={words.continueOnError}
          checked={node.continue_on_error === true}
          onChange={(event) => set({ continue_on_error: event.target.checked || undefined })}
        />
        <Choices
          label={words.reuse}
          options={REUSES}
          value={node.reuse === undefined ? "graph" : node.reuse === true ? "yes" : "no"}
          onChange={(value) => set({ reuse: value === "graph" ? undefined : value === "yes" })}
        />
      </details>
    </>
  )
}

function affinitiesOf(backends: readonly WorkerSeen[]): string[] {
  const fleets = new Set(backends.map((each) => `fleet:${each.fleet}`))
  return [...fleets, ...backends.map((each) => `worker:${each.worker_id}`)]
}

interface PropertyFieldProps extends NodePanelProps {
  port: Port
  property: OfferedProperty | undefined
}

function PropertyField({ port, property, ...props }: PropertyFieldProps) {
  const { document, node, problems, onChange } = props
  const to = `${node.id}.${port.name}`
  const isWired = document.connections.some((each) => each.to === to)
  const wrong = problems.find((each) => each.port === port.name)?.message ?? null
  const isMedia = MEDIA.has(port.type.name)
  return (
    <fieldset className="canvas-property">
      <legend className="unseen">{port.name}</legend>
      {property && !isMedia && !isWired && (
        <OneField
          field={formField(property)}
          value={propertiesOf(node)[port.name] ?? property.default ?? undefined}
          error={wrong}
          onChange={(value) => {
            const given = value === property.default ? undefined : value
            onChange(setProperty(document, node.id, port.name, given), to)
          }}
        />
      )}
      <Wire
        {...props}
        port={port}
        label={isMedia || isWired || !property ? port.name : `${port.name}: ${words.wiredFrom}`}
        hideLabel={!isMedia && !isWired && Boolean(property)}
        error={isMedia || isWired ? wrong : null}
      />
    </fieldset>
  )
}

const KINDS: Record<string, Kind> = { number: "number", integer: "integer", seed: "seed", boolean: "boolean" }

function formField(property: OfferedProperty): FormField {
  const choices = property.choices ?? []
  return {
    name: property.name,
    label: property.name,
    hint: property.description || null,
    kind: choices.length > 0 ? "choice" : (KINDS[property.type] ?? "text"),
    isRequired: property.required,
    isNumber: property.type === "number" || property.type === "integer",
    initial: property.default ?? undefined,
    minimum: property.minimum,
    maximum: property.maximum,
    step: property.step,
    lengthMax: null,
    choices,
  }
}

interface WireProps extends NodePanelProps {
  port: Port
  label: string
  hideLabel?: boolean
  error?: string | null
}

const ASK = "ask when it runs"

/** Where a port's value comes from: the same as the wire on the canvas. */
function Wire({ port, label, hideLabel, error, document, node, types, problems, onChange }: WireProps) {
  const to = `${node.id}.${port.name}`
  const now = document.connections.find((each) => each.to === to)?.from ?? ""
  const sources = types.sourcesFor(to)
  const options = [
    { value: "", label: words.notWired },
    ...[...new Set([...sources, ...(now ? [now] : [])])].map((each) => ({ value: each, label: each })),
    ...(now ? [] : [{ value: ASK, label: words.askAtRun }]),
  ]
  const choose = (value: string) => {
    if (value === ASK) onChange(withInput(document, node, port), null)
    else onChange(value ? connect(document, value, to) : disconnect(document, to), null)
  }
  const wrong = error ?? (hideLabel ? null : problems.find((each) => each.port === port.name)?.message)
  return (
    <Select
      label={label}
      hideLabel={hideLabel}
      options={options}
      value={now}
      error={wrong}
      onChange={choose}
    />
  )
}

/** A new input node that feeds a port. */
function withInput(document: GraphDocument, node: GraphNode, port: Port): GraphDocument {
  const id = freeId(document, port.name)
  const made: GraphNode = { id, type: "input", value_type: port.type.name }
  return connect(addNode(document, made), `${id}.value`, `${node.id}.${port.name}`)
}

function Facts({ offer }: { offer: WorkflowOffer }) {
  return (
    <dl className="canvas-facts">
      <dt>{words.uses}</dt>
      <dd>{`${offer.kind} ${offer.name}`}</dd>
      <dt>{words.typical}</dt>
      <dd>{offer.typical_seconds === null ? words.notMeasured : duration(offer.typical_seconds)}</dd>
      <dt>{words.price}</dt>
      <dd>{tokens(offer.price_tokens)}</dd>
    </dl>
  )
}
