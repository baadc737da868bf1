/** One exposed input: its name, how customers enter it, its range and its default. */

import type { SuggestedProperty } from "@/api/schema"
import { OneField } from "@/pages/effect/Fields"
import { Button, Check, Field, Icon, Select, TextArea } from "@/ui"
import { words } from "@/words/en/workflows"
import { type Exposed, type Format, fieldOf, hasRange, isMediaType, labelOf, MAIN_INPUT } from "./draft"

interface PropertyFormProps {
  property: Exposed
  suggested: SuggestedProperty | undefined
  error: string | null
  isOpen: boolean
  isFirst: boolean
  isLast: boolean
  onToggle: () => void
  onChange: (change: Partial<Exposed>) => void
  onMove: (by: -1 | 1) => void
  onRemove: () => void
}

export function PropertyForm(props: PropertyFormProps) {
  const { property, suggested, error, isOpen } = props
  const label = labelOf(property)
  return (
    <li className={error ? "workflows-property is-wrong" : "workflows-property"} data-property={property.key}>
      <div className="workflows-property-head">
        <button
          type="button"
          className="workflows-property-name"
          aria-expanded={isOpen}
          onClick={props.onToggle}
        >
          <Icon name={isOpen ? "down" : "right"} size={12} />
          <strong>
            <span className="unseen">{words.settingsOf} </span>
            {label}
          </strong>
          <span className="faint">{placeOf(property, suggested)}</span>
        </button>
        <Button
          kind="ghost"
          size="small"
          icon="up"
          label={words.up(label)}
          offReason={props.isFirst && words.isFirst}
          onClick={() => props.onMove(-1)}
        />
        <Button
          kind="ghost"
          size="small"
          icon="down"
          label={words.down(label)}
          offReason={props.isLast && words.isLast}
          onClick={() => props.onMove(1)}
        />
        <Button kind="ghost" size="small" icon="cross" label={words.remove(label)} onClick={props.onRemove} />
      </div>
      {isOpen && <Settings {...props} />}
      {error && (
        <p className="field-error" role="alert">
          {error}
        </p>
      )}
    </li>
  )
}

function placeOf(property: Exposed, suggested: SuggestedProperty | undefined): string {
  if (suggested) return words.boundTo([...suggested.path, suggested.node_title].join(" › "), suggested.input)
  return property.binding ?? words.inText(property.placeholder ?? "")
}

function Settings({ property, onChange }: PropertyFormProps) {
  const isMedia = isMediaType(property.type)
  const isMain = isMedia && property.name === MAIN_INPUT
  return (
    <div className="workflows-property-form">
      <div className="workflows-pair">
        <Field
          label={words.label}
          placeholder={labelOf({ label: null, name: property.name })}
          value={property.label}
          maxLength={200}
          onChange={(event) => onChange({ label: event.target.value })}
        />
        <Field
          label={words.name}
          className="mono"
          value={property.name}
          onChange={(event) => onChange({ name: event.target.value })}
        />
      </div>
      <Field
        label={words.hint}
        value={property.description}
        onChange={(event) => onChange({ description: event.target.value })}
      />
      <p className="field-hint">
        {words.types[property.type]}
        {isMain && `. ${words.mainInput}`}
      </p>
      <FormatField property={property} onChange={onChange} />
      {hasRange(property.type) && <Range property={property} onChange={onChange} />}
      {property.type === "choice" && property.choices && (
        <ChoiceList key={property.key} choices={property.choices} onChange={onChange} />
      )}
      {!isMedia && property.type !== "seed" && (
        <OneField
          field={{ ...fieldOf(property), label: words.default, hint: null, isRequired: true }}
          value={property.default ?? undefined}
          error={null}
          onChange={(value) => onChange({ default: value ?? null })}
        />
      )}
      {isMedia && !isMain && (
        <Button size="small" onClick={() => onChange({ name: MAIN_INPUT })}>
          {words.makeMain}
        </Button>
      )}
      {!isMain && (
        <Check
          label={words.required}
          checked={property.required ?? (isMedia || property.placeholder !== null)}
          onChange={(event) => onChange({ required: event.target.checked })}
        />
      )}
    </div>
  )
}

interface PartProps {
  property: Exposed
  onChange: (change: Partial<Exposed>) => void
}

const FORMATS: Partial<Record<Exposed["type"], readonly Format[]>> = {
  text: ["multiline", "colour"],
  integer: ["colour"],
  image: ["mask"],
}

function FormatField({ property, onChange }: PartProps) {
  const formats = FORMATS[property.type]
  if (!formats || property.name === MAIN_INPUT) return null
  const options = ["" as const, ...formats].map((format) => ({ value: format, label: words.formats[format] }))
  return (
    <Select
      label={words.format}
      options={options}
      value={property.format ?? ""}
      onChange={(format) => onChange({ format: format === "" ? null : format })}
    />
  )
}

function Range({ property, onChange }: PartProps) {
  return (
    <div className="workflows-trio">
      {(["minimum", "maximum", "step"] as const).map((bound) => (
        <Field
          key={bound}
          label={words[bound]}
          type="number"
          step="any"
          value={property[bound] ?? ""}
          onChange={(event) =>
            onChange({ [bound]: event.target.value === "" ? null : Number(event.target.value) })
          }
        />
      ))}
    </div>
  )
}

/** Edits the choices that customers get. Deleting a line removes that choice from the customers'
 * form. */
function ChoiceList({
  choices,
  onChange,
}: {
  choices: readonly unknown[]
  onChange: (change: Partial<Exposed>) => void
}) {
  const valuesByText = new Map(choices.map((choice) => [String(choice), choice]))
  return (
    <TextArea
      label={words.choices}
      hint={words.choicesHint}
      defaultValue={choices.map(String).join("\n")}
      rows={Math.min(8, choices.length + 1)}
      onChange={(event) => {
        const lines = event.target.value.split("\n").filter((line) => line.trim() !== "")
        onChange({ choices: lines.map((line) => valuesByText.get(line) ?? line) })
      }}
    />
  )
}
