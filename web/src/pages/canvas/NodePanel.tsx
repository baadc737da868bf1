/** The node's settings. Connections can also be edited here by keyboard. */

import { useState } from "react"
import type { OfferedProperty, WorkerSeen, WorkflowOffer } from "@/api/schema"
import { Button, Check, Choices, duration, Field, Select, tokens } from "@/ui"
import { words } from "@/words/en/canvas"
import { OneField } from "../effect/Fields"
import type { FormField, Kind } from "../effect/form"
import { rename } from "./copy"
import { DecidingFields } from "./DecidingFields"
import {
  addNode,
  connect,
  disconnect,
  freeId,
  type GraphDocument,
  type GraphNode,
  ID_PATTERN,
  propertiesOf,
  setProperty,
} from "./document"
import { ExpressionField, TemplateField, typedValue } from "./Expression"
import { isByName } from "./names"
import { type NodePanelProps, NumberField, useSet } from "./PanelParts"
import { MEDIA, type Port, propertyOf, VALUE_TYPES } from "./types"

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
  const isTaken = text !== node.id && document.nodes.some((other) => other.id === text)
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
      <DecidingFields key={node.id} {...props} />
      {(isByName(node) ? [] : ports).map((port) => (
        <Wire key={port.name} {...props} port={port} label={`${words.wiredFrom}: ${port.name}`} />
      ))}
    </>
  )
}

const TYPES = VALUE_TYPES.map((type) => ({ value: type as string, label: type as string }))

function InputFields(props: NodePanelProps) {
  const set = useSet(props)
  const type = String(props.node.value_type ?? "any")
  const isMedia = MEDIA.has(type.replace("[]", ""))
  const preset = props.node.default
  const isRequired = props.node.required !== false && preset === undefined
  return (
    <>
      <Select
        label={words.valueType}
        options={
          TYPES.some((option) => option.value === type) ? TYPES : [...TYPES, { value: type, label: type }]
        }
        value={type}
        onChange={(value) => set({ value_type: value === "any" ? undefined : value, default: undefined })}
      />
      {!isMedia && (
        <Field
          label={words.default}
          value={preset === undefined ? "" : typeof preset === "string" ? preset : JSON.stringify(preset)}
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

function ConditionField(props: NodePanelProps) {
  const set = useSet(props)
  const fields = props.types.fieldsGiven(props.node)
  return (
    <ExpressionField
      label={words.condition}
      hint={words.conditionHint}
      text={String(props.node.condition ?? "")}
      wrong={props.problems.find((problem) => problem.port === "condition")?.message}
      names={fields.map((field) => `output.${field}`)}
      onChange={(condition) => set({ condition })}
    />
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
        <NumberField {...props} field="output_count" label={words.outputCount} preset={2} least={1} />
      )}
      {mode === "distribute" && (
        <NumberField {...props} field="max_items" label={words.maxItems} preset={100} least={1} />
      )}
    </>
  )
}

function MergeFields(props: NodePanelProps) {
  const set = useSet(props)
  const { node, document } = props
  const fans = document.nodes.filter((other) => other.type === "fanout" && other.per_item === true)
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
          ...fans.map((fan) => ({ value: fan.id, label: fan.id })),
        ]}
        value={String(node.over ?? "")}
        onChange={(value) => set({ over: value || undefined })}
      />
    </>
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
      {ports.map((port) => (
        <PropertyField key={port.name} {...props} port={port} property={propertyOf(offer, port.name)} />
      ))}
      <Field
        label={words.runsOn}
        hint={words.runsOnHint}
        error={problems.find((problem) => problem.port === "backend_affinity")?.message}
        value={String(node.backend_affinity ?? "")}
        placeholder={words.anyWorker}
        list="canvas-affinities"
        onChange={(event) => set({ backend_affinity: event.target.value.trim() || undefined })}
      />
      <datalist id="canvas-affinities">
        {affinitiesOf(backends).map((affinity) => (
          <option key={affinity} value={affinity} />
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
        <NumberField {...props} field="retries" label={words.retries} preset={0} least={0} />
        <NumberField {...props} field="timeout" label={words.timeout} least={1} />
        <NumberField {...props} field="priority" label={words.priority} preset={0} least={-1000} />
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
  const fleets = new Set(backends.map((worker) => `fleet:${worker.fleet}`))
  return [...fleets, ...backends.map((worker) => `worker:${worker.worker_id}`)]
}

interface PropertyFieldProps extends NodePanelProps {
  port: Port
  property: OfferedProperty | undefined
}

function PropertyField({ port, property, ...props }: PropertyFieldProps) {
  const { document, node, problems, onChange } = props
  const to = `${node.id}.${port.name}`
  const isWired = document.connections.some((connection) => connection.to === to)
  const wrong = problems.find((problem) => problem.port === port.name)?.message ?? null
  const isMedia = MEDIA.has(port.type.name)
  const value = propertiesOf(node)[port.name]
  const isText = property?.type === "text" && !property.choices?.length
  const isTemplate = !isWired && (isText || isTemplated(value))
  const isAlone = isWired || !(isTemplate || (property && !isMedia))
  return (
    <fieldset className="canvas-property">
      <legend className="unseen">{port.name}</legend>
      {isTemplate && (
        <TemplateField
          label={port.name}
          hint={property?.description || undefined}
          placeholder={property?.default == null ? undefined : String(property.default)}
          type={property?.type ?? "any"}
          value={value}
          wrong={wrong ?? undefined}
          names={props.types.namesFor(node.id)}
          onChange={(template) => onChange(setProperty(document, node.id, port.name, template), to)}
        />
      )}
      {property && !isMedia && !isWired && !isTemplate && (
        <OneField
          field={formField(property)}
          value={value ?? property.default ?? undefined}
          error={wrong}
          onChange={(value) => {
            const changed = value === property.default ? undefined : value
            onChange(setProperty(document, node.id, port.name, changed), to)
          }}
        />
      )}
      <Wire
        {...props}
        port={port}
        label={isAlone ? port.name : `${port.name}: ${words.wiredFrom}`}
        hideLabel={!isAlone}
        error={isAlone ? wrong : null}
      />
    </fieldset>
  )
}

function isTemplated(value: unknown): boolean {
  return typeof value === "string" && value.includes("{{")
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
const TEMPLATE = "by a template"

/** Selects the source of a port's value, which is also shown as a connection on the canvas. */
function Wire({ port, label, hideLabel, error, document, node, types, problems, onChange }: WireProps) {
  const to = `${node.id}.${port.name}`
  const now = document.connections.find((connection) => connection.to === to)?.from ?? ""
  const sources = types.sourcesFor(to)
  const options = [
    { value: "", label: words.notWired },
    ...[...new Set([...sources, ...(now ? [now] : [])])].map((source) => ({ value: source, label: source })),
    ...(now ? [] : [{ value: ASK, label: words.askAtRun }]),
    ...(now || node.type !== "workflow" ? [] : [{ value: TEMPLATE, label: words.byTemplate }]),
  ]
  const choose = (value: string) => {
    if (value === ASK) onChange(withInput(document, node, port), null)
    else if (value === TEMPLATE) onChange(setProperty(document, node.id, port.name, "{{ }}"), null)
    else onChange(value ? connect(document, value, to) : disconnect(document, to), null)
  }
  const wrong = error ?? (hideLabel ? null : problems.find((problem) => problem.port === port.name)?.message)
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

/** Adds an input node that feeds a port. */
function withInput(document: GraphDocument, node: GraphNode, port: Port): GraphDocument {
  const id = freeId(document, port.name)
  const input: GraphNode = { id, type: "input", value_type: port.type.name }
  return connect(addNode(document, input), `${id}.value`, `${node.id}.${port.name}`)
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
