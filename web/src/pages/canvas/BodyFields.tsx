/** Edits the work of a map or a loop: an effect or a workflow with its properties, or a stored
 * graph with its inputs. */

import { useState } from "react"
import type { GraphSummary, OfferedProperty, WorkflowOffer } from "@/api/schema"
import { Choices, Select, TextArea } from "@/ui"
import { words } from "@/words/en/canvas"
import { TemplateField } from "./Expression"
import { useGraphs } from "./inner"
import { bodyOf, setAt, valueAt } from "./names"
import { type NodePanelProps, useSet, wrongAt } from "./PanelParts"
import { MEDIA } from "./types"

type GraphReference = Readonly<Record<string, unknown>>

interface BodyFieldsProps extends NodePanelProps {
  /** The names that are defined inside the node, such as `item`. */
  inner: readonly string[]
}

export function BodyFields(props: BodyFieldsProps) {
  const set = useSet(props)
  const { node, offers, types } = props
  const body = bodyOf(node)
  const kind = "nodes" in body ? "nodes" : "graph" in body ? "graph" : "workflow"
  const options = [
    { value: "workflow", label: words.does.workflow },
    { value: "graph", label: words.does.graph },
    ...(kind === "nodes" ? [{ value: "nodes", label: words.does.nodes }] : []),
  ]
  const pick = ({ offer, ...work }: PickedWork) => {
    const first = offer?.properties.find((property) => MEDIA.has(property.type))
    const isItem = node.type === "map" && first && types.itemIs(node, first.type)
    set({ do: { ...work, ...(isItem ? { properties: { [first.name]: "{{ item }}" } } : {}) } })
  }
  const offer = offers.find((offer) => offer.name === body[offer.kind])
  return (
    <>
      <Choices
        label={words.doesWhat}
        options={options}
        value={kind}
        onChange={(value) => {
          if (value === "workflow") set({ do: { workflow: "" } })
          if (value === "graph") set({ do: { graph: "", version: 1 } })
        }}
      />
      {kind === "nodes" && <BodyNodes {...props} />}
      {kind === "workflow" && (
        <>
          <WorkSelect
            {...props}
            label={words.work}
            work={body}
            wrong={wrongAt(props, "workflow", "effect", "do")}
            onPick={pick}
          />
          <PropertyFields {...props} properties={offer?.properties ?? []} />
        </>
      )}
      {kind === "graph" && (
        <>
          <GraphPick
            {...props}
            named={body}
            onPick={(picked) => set({ do: picked })}
            onVersion={(version) => set({ do: { ...body, version } })}
          />
          <InputFields {...props} named={body} />
        </>
      )}
    </>
  )
}

interface PickedWork {
  workflow?: string
  effect?: string
  offer: WorkflowOffer | undefined
}

interface WorkSelectProps extends NodePanelProps {
  label: string
  work: GraphReference
  wrong: string | undefined
  onPick: (work: PickedWork) => void
}

/** Selects an effect or a workflow. */
export function WorkSelect({ label, work, wrong, offers, onPick }: WorkSelectProps) {
  const now = work.effect ? `effect:${String(work.effect)}` : `workflow:${String(work.workflow ?? "")}`
  const options = offers.map((offer) => ({
    value: `${offer.kind}:${offer.name}`,
    label: offer.kind === "effect" ? words.effectNamed(offer.name) : offer.name,
  }))
  const none = now === "workflow:" ? [{ value: now, label: words.choose }] : []
  const other =
    !none.length && !options.some((option) => option.value === now) ? [{ value: now, label: now }] : []
  return (
    <Select
      label={label}
      options={[...none, ...other, ...options]}
      value={now}
      error={wrong}
      onChange={(value) => {
        const offer = offers.find((offer) => `${offer.kind}:${offer.name}` === value)
        if (offer) onPick({ [offer.kind]: offer.name, offer })
      }}
    />
  )
}

interface PropertyFieldsProps extends BodyFieldsProps {
  properties: readonly OfferedProperty[]
}

/** Shows required properties, files and properties with a value first, and the rest below. */
export function PropertyFields({ properties, ...props }: PropertyFieldsProps) {
  const isFirst = ({ name, required, type }: OfferedProperty) =>
    required || MEDIA.has(type) || valueAt(props.node, name) !== undefined
  // A property that gets a value while the panel is open keeps its position.
  const [first, setFirst] = useState<{ of: string; names: readonly string[] }>({ of: "", names: [] })
  const of = properties.map((property) => property.name).join(" ")
  if (first.of !== of) setFirst({ of, names: properties.filter(isFirst).map((property) => property.name) })
  const shown = properties.filter((property) => first.names.includes(property.name))
  const rest = properties.filter((property) => !first.names.includes(property.name))
  const one = (property: OfferedProperty) => (
    <ValueField
      key={property.name}
      {...props}
      name={property.name}
      type={property.type}
      hint={property.description || undefined}
      preset={property.default}
    />
  )
  return (
    <>
      {shown.map(one)}
      {rest.length > 0 && (
        <details className="canvas-more" open={shown.length === 0}>
          <summary>{words.otherProperties(rest.length)}</summary>
          {rest.map(one)}
        </details>
      )}
    </>
  )
}

interface ValueFieldProps extends BodyFieldsProps {
  name: string
  type: string
  hint?: string
  preset?: unknown
}

function ValueField({ name, type, hint, preset, inner, ...props }: ValueFieldProps) {
  const { document, node, types, onChange } = props
  const placeholder = MEDIA.has(type)
    ? `{{ ${inner[0] ?? "photo"} }}`
    : preset != null
      ? String(preset)
      : type
  return (
    <TemplateField
      label={name}
      hint={hint}
      placeholder={placeholder}
      type={type}
      value={valueAt(node, name)}
      wrong={wrongAt(props, name)}
      names={[...inner, ...types.namesFor(node.id)]}
      onChange={(value) => onChange(setAt(document, node.id, name, value), `${node.id}.${name}`)}
    />
  )
}

interface GraphPickProps extends NodePanelProps {
  named: GraphReference
  onPick: (picked: { graph: string; version: number }) => void
  onVersion: (version: number) => void
}

/** Selects a stored graph and one of its versions. */
export function GraphPick({ named, onPick, onVersion, ...props }: GraphPickProps) {
  const graphs = useGraphs()
  const graph =
    graphs.find((item) => item.id === named.graph) ?? graphs.find((item) => item.name === named.graph)
  const version = typeof named.version === "number" ? named.version : 1
  const newest = Math.max(version, graph?.version ?? 1)
  const none = { value: "", label: words.choose }
  const nameOrId = String(named.graph ?? "")
  const other = nameOrId && !graph ? [{ value: nameOrId, label: nameOrId }] : []
  return (
    <div className="canvas-two is-top">
      <Select
        label={words.graphInside}
        options={[
          ...(nameOrId ? [] : [none]),
          ...other,
          ...graphs.map((item) => ({ value: item.id, label: item.name })),
        ]}
        value={graph?.id ?? nameOrId}
        error={wrongAt(props, "graph")}
        aside={
          graph && (
            <a
              href={`/graphs/${graph.id}`}
              target="_blank"
              rel="noreferrer"
              aria-label={words.openInside(graph.name)}
            >
              {words.openShort}
            </a>
          )
        }
        onChange={(id) => {
          const picked = graphs.find((item) => item.id === id)
          if (picked) onPick({ graph: nameFor(picked, graphs), version: picked.version })
        }}
      />
      <Select
        label={words.versionInside}
        options={Array.from({ length: newest }, (_, at) => String(newest - at)).map((version) => ({
          value: version,
          label: version,
        }))}
        value={String(version)}
        error={wrongAt(props, "version")}
        onChange={(value) => onVersion(Number(value))}
      />
    </div>
  )
}

/** Returns the graph's name, or its id if another graph has the same name. */
function nameFor(picked: GraphSummary, graphs: readonly GraphSummary[]): string {
  return graphs.filter((graph) => graph.name === picked.name).length > 1 ? picked.id : picked.name
}

interface InputFieldsProps extends BodyFieldsProps {
  named: GraphReference
}

export function InputFields({ named, ...props }: InputFieldsProps) {
  const ports = props.innerOf(named)
  if (!named.graph) return null
  return (
    <>
      {ports?.inputs.map((port) => (
        <ValueField key={port.name} {...props} name={port.name} type={port.type} />
      ))}
      {ports?.inputs.length === 0 && <p className="faint">{words.inputsNone}</p>}
    </>
  )
}

/** Edits several nodes as text. A change is applied as soon as the text can be parsed. */
function BodyNodes(props: NodePanelProps) {
  const set = useSet(props)
  const [text, setText] = useState(() => JSON.stringify(bodyOf(props.node), null, 2))
  const [isBroken, setBroken] = useState(false)
  return (
    <TextArea
      label={words.does.nodes}
      hint={words.bodyNodesHint}
      error={isBroken ? words.notJson : wrongAt(props, "do")}
      value={text}
      rows={Math.min(16, text.split("\n").length + 1)}
      spellCheck={false}
      onChange={(event) => {
        setText(event.target.value)
        try {
          set({ do: JSON.parse(event.target.value) })
          setBroken(false)
        } catch {
          setBroken(true)
        }
      }}
    />
  )
}
