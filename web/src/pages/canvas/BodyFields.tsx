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

type Named = Readonly<Record<string, unknown>>

interface BodyFieldsProps extends NodePanelProps {
  /** Names defined inside the node, such as item. */
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
    const first = offer?.properties.find((each) => MEDIA.has(each.type))
    const isItem = node.type === "map" && first && types.itemIs(node, first.type)
    set({ do: { ...work, ...(isItem ? { properties: { [first.name]: "{{ item }}" } } : {}) } })
  }
  const offer = offers.find((each) => each.name === body[each.kind])
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
  work: Named
  wrong: string | undefined
  onPick: (work: PickedWork) => void
}

/** Selects an effect or a workflow. */
export function WorkSelect({ label, work, wrong, offers, onPick }: WorkSelectProps) {
  const now = work.effect ? `effect:${String(work.effect)}` : `workflow:${String(work.workflow ?? "")}`
  const known = offers.map((each) => ({
    value: `${each.kind}:${each.name}`,
    label: each.kind === "effect" ? words.effectNamed(each.name) : each.name,
  }))
  const none = now === "workflow:" ? [{ value: now, label: words.choose }] : []
  const other = !none.length && !known.some((each) => each.value === now) ? [{ value: now, label: now }] : []
  return (
    <Select
      label={label}
      options={[...none, ...other, ...known]}
      value={now}
      error={wrong}
      onChange={(value) => {
        const offer = offers.find((each) => `${each.kind}:${each.name}` === value)
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
  const of = properties.map((each) => each.name).join(" ")
  if (first.of !== of) setFirst({ of, names: properties.filter(isFirst).map((each) => each.name) })
  const shown = properties.filter((each) => first.names.includes(each.name))
  const rest = properties.filter((each) => !first.names.includes(each.name))
  const one = (each: OfferedProperty) => (
    <ValueField
      key={each.name}
      {...props}
      name={each.name}
      type={each.type}
      hint={each.description || undefined}
      usual={each.default}
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
  usual?: unknown
}

function ValueField({ name, type, hint, usual, inner, ...props }: ValueFieldProps) {
  const { document, node, types, onChange } = props
  const placeholder = MEDIA.has(type) ? `{{ ${inner[0] ?? "photo"} }}` : usual != null ? String(usual) : type
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
  named: Named
  onPick: (picked: { graph: string; version: number }) => void
  onVersion: (version: number) => void
}

/** Selects a stored graph and one of its versions. */
export function GraphPick({ named, onPick, onVersion, ...props }: GraphPickProps) {
  const graphs = useGraphs()
  const found =
    graphs.find((each) => each.id === named.graph) ?? graphs.find((each) => each.name === named.graph)
  const version = typeof named.version === "number" ? named.version : 1
  const newest = Math.max(version, found?.version ?? 1)
  const none = { value: "", label: words.choose }
  const told = String(named.graph ?? "")
  const other = told && !found ? [{ value: told, label: told }] : []
  return (
    <div className="canvas-two is-top">
      <Select
        label={words.graphInside}
        options={[
          ...(told ? [] : [none]),
          ...other,
          ...graphs.map((each) => ({ value: each.id, label: each.name })),
        ]}
        value={found?.id ?? told}
        error={wrongAt(props, "graph")}
        aside={
          found && (
            <a
              href={`/graphs/${found.id}`}
              target="_blank"
              rel="noreferrer"
              aria-label={words.openInside(found.name)}
            >
              {words.openShort}
            </a>
          )
        }
        onChange={(id) => {
          const picked = graphs.find((each) => each.id === id)
          if (picked) onPick({ graph: nameFor(picked, graphs), version: picked.version })
        }}
      />
      <Select
        label={words.versionInside}
        options={Array.from({ length: newest }, (_, at) => String(newest - at)).map((each) => ({
          value: each,
          label: each,
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
  return graphs.filter((each) => each.name === picked.name).length > 1 ? picked.id : picked.name
}

interface InputFieldsProps extends BodyFieldsProps {
  named: Named
}

export function InputFields({ named, ...props }: InputFieldsProps) {
  const ports = props.innerOf(named)
  if (!named.graph) return null
  return (
    <>
      {ports?.inputs.map((each) => (
        <ValueField key={each.name} {...props} name={each.name} type={each.type} />
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
