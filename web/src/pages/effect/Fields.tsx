/** Renders one input for each property of an effect. */

import { Button, Check, Choices, Field, FieldFrame, Select, Slider, TextArea } from "@/ui"
import { words } from "@/words/en/effect"
import { colorText, colorValue, type FormField, isSlider, randomSeed, stepOf } from "./form"

interface OneFieldProps {
  field: FormField
  value: unknown
  error: string | null
  onChange: (value: unknown) => void
}

/** Up to this many short options are shown next to each other. */
const CHOICES_MAX = 4
const CHOICE_CHARACTERS_MAX = 12

export function OneField({ field, value, error, onChange }: OneFieldProps) {
  const aside = !field.isRequired && field.initial === undefined && (
    <span className="field-hint">{words.optional}</span>
  )
  const shared = { label: field.label, hint: field.hint, error, aside }
  if (field.kind === "boolean")
    return (
      <div className="field">
        <Check
          label={field.label}
          checked={Boolean(value)}
          onChange={(event) => onChange(event.target.checked)}
        />
        {field.hint && <p className="field-hint">{field.hint}</p>}
      </div>
    )
  if (field.kind === "choice") return <ChoiceField {...{ field, value, error, onChange }} />
  if (field.kind === "colour")
    return (
      <FieldFrame {...shared}>
        {(ids) => (
          <div className="input effect-colour">
            <input
              {...ids}
              type="color"
              value={colorText(value)}
              onChange={(event) => onChange(colorValue(field, event.target.value))}
            />
            <span className="mono">{colorText(value)}</span>
          </div>
        )}
      </FieldFrame>
    )
  if (isSlider(field))
    return (
      <Slider
        label={field.label}
        hint={field.hint}
        error={error}
        value={Number(value ?? field.initial)}
        min={field.minimum ?? 0}
        max={field.maximum ?? 100}
        step={stepOf(field)}
        onChange={onChange}
      />
    )
  if (field.kind === "number" || field.kind === "integer" || field.kind === "seed")
    return (
      <Field
        {...shared}
        hint={field.hint ?? (field.kind === "seed" ? words.seed : undefined)}
        type="number"
        inputMode={field.kind === "number" ? "decimal" : "numeric"}
        min={field.minimum ?? undefined}
        max={field.maximum ?? undefined}
        step={field.kind === "number" ? "any" : 1}
        value={value === undefined || value === null ? "" : String(value)}
        onChange={(event) => onChange(event.target.value === "" ? undefined : Number(event.target.value))}
        after={
          field.kind === "seed" && (
            <Button
              kind="ghost"
              size="small"
              icon="dice"
              label={words.dice}
              onClick={() => onChange(randomSeed(field))}
            />
          )
        }
      />
    )
  const text = typeof value === "string" ? value : ""
  if (field.kind === "multiline")
    return <TextArea {...shared} value={text} onChange={(event) => onChange(event.target.value)} />
  return <Field {...shared} value={text} onChange={(event) => onChange(event.target.value)} />
}

/** Options may have values of any type, so they are identified by position. */
function ChoiceField({ field, value, error, onChange }: OneFieldProps) {
  const options = field.choices.map((choice, place) => ({ value: String(place), label: String(choice) }))
  const at = field.choices.indexOf(value)
  const isShort = options.every((option) => option.label.length <= CHOICE_CHARACTERS_MAX)
  const take = (place: string) => onChange(place === "" ? undefined : field.choices[Number(place)])
  if (at >= 0 && isShort && options.length <= CHOICES_MAX)
    return <Choices label={field.label} options={options} value={String(at)} onChange={take} />
  const none = { value: "", label: words.noChoice }
  return (
    <Select
      label={field.label}
      hint={field.hint}
      error={error}
      options={at < 0 || field.initial === undefined ? [none, ...options] : options}
      value={at < 0 ? "" : String(at)}
      onChange={take}
    />
  )
}
