/** The settings of deciding nodes: value, switch, approve, map, loop, graph and score. */

import { useState } from "react"
import { Button, Check, Choices, Field, Select, TextArea } from "@/ui"
import { words } from "@/words/en/canvas"
import { BodyFields, GraphPick, InputFields, PropertyFields, WorkSelect } from "./BodyFields"
import { type GraphDocument, type GraphNode, ID_PATTERN, setFields } from "./document"
import { ExpressionField, TemplateField } from "./Expression"
import { nameOf, recordOf, setAt } from "./names"
import { type NodePanelProps, NumberField, useSet, wrongAt } from "./PanelParts"
import { MEDIA } from "./types"

export function DecidingFields(props: NodePanelProps) {
  const { type } = props.node
  if (type === "value") return <ValueFields {...props} />
  if (type === "switch") return <SwitchFields {...props} />
  if (type === "approve") return <ApproveFields {...props} />
  if (type === "map") return <MapFields {...props} />
  if (type === "loop") return <LoopFields {...props} />
  if (type === "graph") return <GraphFields {...props} />
  return type === "score" ? <ScoreFields {...props} /> : null
}

/** Updates the connections that start at a renamed port. */
function withPort(document: GraphDocument, id: string, before: string, after: string): GraphDocument {
  const [old, now] = [`${id}.${before}`, `${id}.${after}`]
  const moved = (from: string) =>
    from === old || from.startsWith(`${old}.`) ? now + from.slice(old.length) : from
  return {
    ...document,
    connections: document.connections.map((connection) => ({ ...connection, from: moved(connection.from) })),
  }
}

function freeName(names: readonly string[], base: string): string {
  let number = names.length + 1
  while (names.includes(`${base}_${number}`)) number += 1
  return names.includes(base) ? `${base}_${number}` : base
}

interface NameFieldProps {
  label: string
  name: string
  usedNames: readonly string[]
  onRename: (name: string) => void
  onRemove?: () => void
}

/** Applies a name when the field loses focus, because each typed letter would create another
 * port. */
function NameField({ label, name, usedNames, onRename, onRemove }: NameFieldProps) {
  const [text, setText] = useState(name)
  const isTaken = text !== name && usedNames.includes(text)
  const wrong = !ID_PATTERN.test(text) ? words.idWrong : isTaken ? words.nameTaken : null
  const keep = () => {
    if (!wrong && text !== name) onRename(text)
  }
  return (
    <Field
      label={label}
      value={text}
      error={wrong}
      spellCheck={false}
      onChange={(event) => setText(event.target.value)}
      onBlur={keep}
      onKeyDown={(event) => event.key === "Enter" && keep()}
      after={
        onRemove && (
          <Button kind="ghost" size="small" icon="cross" label={words.takeAway(name)} onClick={onRemove} />
        )
      }
    />
  )
}

interface RowsProps extends NodePanelProps {
  field: "values" | "start"
  prefix: string
  nameLabel: string
  add: string
}

/** Edits named values, which are templates. */
function NamedValues({ field, prefix, nameLabel, add, ...props }: RowsProps) {
  const { document, node, types, onChange } = props
  const values = recordOf(node[field])
  const names = Object.keys(values)
  const least = field === "values" ? 1 : 0
  const put = (next: Record<string, unknown>, tag: string | null = null) =>
    onChange(setFields(document, node.id, { [field]: Object.keys(next).length > 0 ? next : undefined }), tag)
  const rename = (before: string, after: string) => {
    const next = Object.fromEntries(
      Object.entries(values).map(([name, value]) => [name === before ? after : name, value]),
    )
    const changed = setFields(document, node.id, { [field]: next })
    onChange(field === "values" ? withPort(changed, node.id, before, after) : changed, null)
  }
  return (
    <>
      {names.map((name, at) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: a renamed row keeps its position
        <fieldset key={at} className="canvas-row">
          <legend className="unseen">{name}</legend>
          <NameField
            key={name}
            label={nameLabel}
            name={name}
            usedNames={names}
            onRename={(after) => rename(name, after)}
            onRemove={
              names.length > least
                ? () => put(Object.fromEntries(Object.entries(values).filter(([other]) => other !== name)))
                : undefined
            }
          />
          <TemplateField
            label={words.valueOf(name)}
            placeholder={words.templatePlaceholder}
            type="any"
            value={values[name] === "" ? undefined : values[name]}
            wrong={wrongAt(props, prefix + name) ?? (prefix ? wrongAt(props, name) : undefined)}
            names={types.namesFor(node.id)}
            onChange={(value) =>
              onChange(
                setFields(document, node.id, { [field]: { ...values, [name]: value ?? "" } }),
                `${node.id}.${prefix}${name}`,
              )
            }
          />
        </fieldset>
      ))}
      <Button size="small" icon="plus" onClick={() => put({ ...values, [freeName(names, "value")]: "" })}>
        {add}
      </Button>
    </>
  )
}

function ValueFields(props: NodePanelProps) {
  const wrong = wrongAt(props, "values")
  return (
    <>
      <p className="faint">{words.valueHint}</p>
      {wrong && <p className="field-error">{wrong}</p>}
      <NamedValues {...props} field="values" prefix="" nameLabel={words.valueName} add={words.addValue} />
    </>
  )
}

interface Case {
  name: string
  when: string
}

function casesOf(node: GraphNode): Case[] {
  const rows = Array.isArray(node.cases) ? node.cases : []
  return rows.map((row) => {
    const { name, when } = recordOf(row)
    return { name: String(name ?? ""), when: String(when ?? "") }
  })
}

function SwitchFields(props: NodePanelProps) {
  const { document, node, types, onChange } = props
  const cases = casesOf(node)
  const names = cases.map((branch) => branch.name)
  const fields = types.fieldsGiven(node).map((field) => `output.${field}`)
  const put = (next: readonly Case[], tag: string | null = null) =>
    onChange(setFields(document, node.id, { cases: next }), tag)
  const rename = (at: number, after: string) => {
    const next = cases.map((branch, place) => (place === at ? { ...branch, name: after } : branch))
    onChange(withPort(setFields(document, node.id, { cases: next }), node.id, names[at] ?? "", after), null)
  }
  const wrong = wrongAt(props, "cases")
  return (
    <>
      <p className="faint">{words.switchHint}</p>
      {wrong && <p className="field-error">{wrong}</p>}
      {cases.map(({ name, when }, at) => (
        // biome-ignore lint/suspicious/noArrayIndexKey: a renamed row keeps its position
        <fieldset key={at} className="canvas-row">
          <legend className="unseen">{words.way(at + 1)}</legend>
          <NameField
            key={name}
            label={words.way(at + 1)}
            name={name}
            usedNames={[...names, "default"]}
            onRename={(after) => rename(at, after)}
            onRemove={cases.length > 1 ? () => put(cases.filter((_, place) => place !== at)) : undefined}
          />
          <ExpressionField
            label={words.when(name)}
            text={when}
            wrong={wrongAt(props, `cases.${at}.when`)}
            names={fields}
            onChange={(text) =>
              put(
                cases.map((branch, place) => (place === at ? { ...branch, when: text } : branch)),
                `${node.id}.cases.${at}`,
              )
            }
          />
        </fieldset>
      ))}
      <Button
        size="small"
        icon="plus"
        onClick={() => put([...cases, { name: freeName(names, "way"), when: "" }])}
      >
        {words.addWay}
      </Button>
    </>
  )
}

const UNITS = [
  { value: "86400", label: words.units.days },
  { value: "3600", label: words.units.hours },
  { value: "60", label: words.units.minutes },
  { value: "1", label: words.units.seconds },
]

/** Edits a deadline. It is stored in seconds, and shown in the largest unit that gives a whole
 * number. */
function DeadlineFields(props: NodePanelProps) {
  const set = useSet(props)
  const seconds = typeof props.node.deadline === "number" ? props.node.deadline : null
  const fitting = UNITS.find((unit) => seconds !== null && seconds % Number(unit.value) === 0)
  const [unit, setUnit] = useState(fitting?.value ?? "3600")
  const put = (count: string, of: string) =>
    set({ deadline: count === "" ? undefined : Math.round(Number(count) * Number(of)) })
  return (
    <>
      <div className="canvas-two">
        <Field
          label={words.deadline}
          type="number"
          min={0}
          step="any"
          placeholder={words.noDeadline}
          error={wrongAt(props, "deadline")}
          value={seconds === null ? "" : String(seconds / Number(unit))}
          onChange={(event) => put(event.target.value, unit)}
        />
        <Select
          label={words.unit}
          hideLabel
          options={UNITS}
          value={unit}
          onChange={(value) => {
            setUnit(value)
            if (seconds !== null) put(String(seconds / Number(unit)), value)
          }}
        />
      </div>
      {seconds !== null && (
        <Choices
          label={words.onDeadline}
          options={(["approve", "reject", "fail"] as const).map((value) => ({
            value,
            label: words.deadlineChoices[value],
          }))}
          value={(props.node.on_deadline ?? "fail") as "approve" | "reject" | "fail"}
          onChange={(value) => set({ on_deadline: value === "fail" ? undefined : value })}
        />
      )}
    </>
  )
}

function ApproveFields(props: NodePanelProps) {
  const set = useSet(props)
  const { node } = props
  return (
    <>
      <TextArea
        label={words.question}
        rows={2}
        value={String(node.message ?? "")}
        error={wrongAt(props, "message")}
        onChange={(event) => set({ message: event.target.value || undefined })}
      />
      <Check
        label={words.pick}
        checked={node.pick === true}
        onChange={(event) => set({ pick: event.target.checked || undefined })}
      />
      <DeadlineFields {...props} />
    </>
  )
}

/** Selects the list that a map or a judge iterates over. */
function OverField(props: NodePanelProps) {
  const { document, node, types, onChange } = props
  const list = `canvas-over-${node.id}`
  const sources = types.sourcesFor(`${node.id}.over`).map((source) => nameOf(document, source))
  return (
    <>
      <Field
        label={words.overList}
        hint={words.overHint}
        error={wrongAt(props, "over")}
        value={String(node.over ?? "")}
        placeholder="input.rows"
        list={list}
        spellCheck={false}
        onChange={(event) =>
          onChange(setAt(document, node.id, "over", event.target.value.trim()), `${node.id}.over`)
        }
      />
      <datalist id={list}>
        {sources.map((source) => (
          <option key={source} value={source} />
        ))}
      </datalist>
    </>
  )
}

function MapFields(props: NodePanelProps) {
  const set = useSet(props)
  const { node, types } = props
  const fields = types.fieldsOfItem(node).map((field) => `item.${field}`)
  return (
    <>
      <OverField {...props} />
      <BodyFields {...props} inner={["item", ...fields, "index"]} />
      <NumberField {...props} field="at_once" label={words.atOnce} least={1} />
      <Check
        label={words.continueOnOne}
        checked={node.continue_on_error === true}
        onChange={(event) => set({ continue_on_error: event.target.checked || undefined })}
      />
      <NumberField {...props} field="max_items" label={words.maxItems} preset={100} least={1} />
    </>
  )
}

function LoopFields(props: NodePanelProps) {
  const set = useSet(props)
  const { node, types } = props
  const fields = [...new Set([...Object.keys(recordOf(node.start)), ...types.fieldsOfBody(node)])]
  const previous = fields.map((field) => `previous.${field}`)
  const names = [...types.fieldsOfBody(node).map((field) => `output.${field}`), "round"]
  return (
    <>
      <BodyFields {...props} inner={["round", "previous", ...previous]} />
      <ExpressionField
        label={words.until}
        hint={words.untilHint}
        text={String(node.until ?? "")}
        wrong={wrongAt(props, "until")}
        names={names}
        onChange={(until) => set({ until })}
      />
      <NumberField {...props} field="at_most" label={words.atMost} least={1} />
      <ExpressionField
        label={words.bestRound}
        hint={words.bestHint}
        placeholder="output.json"
        text={String(node.best ?? "")}
        wrong={wrongAt(props, "best")}
        names={[]}
        onChange={(best) => set({ best: best || undefined })}
      />
      <details className="canvas-more" open={node.start !== undefined}>
        <summary>{words.startValues}</summary>
        <NamedValues
          {...props}
          field="start"
          prefix="start."
          nameLabel={words.valueName}
          add={words.addValue}
        />
      </details>
    </>
  )
}

function GraphFields(props: NodePanelProps) {
  const { node } = props
  const set = useSet(props)
  return (
    <>
      <GraphPick
        {...props}
        named={node}
        onPick={(picked) => set({ ...picked, inputs: undefined })}
        onVersion={(version) => set({ version })}
      />
      <InputFields {...props} named={node} inner={[]} />
    </>
  )
}

const MEASURES = (["sharpness", "exposure"] as const).map((value) => ({
  value: value as string,
  label: words.measures[value],
}))

function ScoreFields(props: NodePanelProps) {
  const set = useSet(props)
  const { node, offers } = props
  const isMeasure = node.measure !== undefined
  return (
    <>
      <OverField {...props} />
      <Choices
        label={words.judgedBy}
        options={[
          { value: "measure", label: words.judges.measure },
          { value: "workflow", label: words.judges.workflow },
        ]}
        value={isMeasure ? "measure" : "workflow"}
        onChange={(value) =>
          set({
            measure: value === "measure" ? "sharpness" : undefined,
            workflow: value === "measure" ? undefined : "",
            effect: undefined,
            property: undefined,
            properties: undefined,
            score: undefined,
          })
        }
      />
      {isMeasure ? (
        <Select
          label={words.measure}
          options={MEASURES}
          value={String(node.measure)}
          error={wrongAt(props, "measure") ?? wrongAt(props, "workflow")}
          onChange={(measure) => set({ measure })}
        />
      ) : (
        <JudgeFields {...props} />
      )}
      <NumberField {...props} field="keep" label={words.keepBest} least={1} />
      <NumberField {...props} field="at_once" label={words.atOnce} least={1} />
      <NumberField {...props} field="max_items" label={words.maxItems} preset={100} least={1} />
      {offers.length === 0 && <p className="faint">{words.noOffers}</p>}
    </>
  )
}

/** Selects the workflow that scores a picture with a number. */
function JudgeFields(props: NodePanelProps) {
  const set = useSet(props)
  const { node, offers } = props
  const kind = typeof node.effect === "string" ? "effect" : "workflow"
  const offer = offers.find((offer) => offer.kind === kind && offer.name === (node.effect ?? node.workflow))
  const media = offer?.properties.filter((property) => MEDIA.has(property.type)) ?? []
  const picture = String(node.property ?? "image")
  return (
    <>
      <WorkSelect
        {...props}
        label={words.judge}
        work={node}
        wrong={wrongAt(props, "workflow") ?? wrongAt(props, "effect")}
        onPick={(work) => {
          const first = work.offer?.properties.find((property) => MEDIA.has(property.type))?.name
          set({
            workflow: work.workflow,
            effect: work.effect,
            property: first === "image" ? undefined : first,
            properties: undefined,
          })
        }}
      />
      {media.length > 1 && (
        <Select
          label={words.pictureInto}
          options={media.map(({ name }) => ({ value: name, label: name }))}
          value={picture}
          onChange={(value) => set({ property: value === "image" ? undefined : value })}
        />
      )}
      <PropertyFields
        {...props}
        properties={offer?.properties.filter((property) => property.name !== picture) ?? []}
        inner={["item", "index"]}
      />
      <ExpressionField
        label={words.scoreNumber}
        hint={words.scoreHint}
        placeholder="output.json"
        text={String(node.score ?? "")}
        wrong={wrongAt(props, "score")}
        names={[]}
        onChange={(score) => set({ score: score || undefined })}
      />
    </>
  )
}
