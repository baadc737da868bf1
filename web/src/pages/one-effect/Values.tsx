/** Edits the values of workflow properties: defaults in the customer's form, and fixed values. */

import type { PropertyAnswer } from "@/api/schema"
import { OneField } from "@/pages/effect/Fields"
import { fieldOf, labelOf } from "@/pages/workflows/draft"
import { cut, valueText } from "@/pages/workflows/layout"
import { Button, Check, Panel } from "@/ui"
import { words } from "@/words/en/effects"
import { type Face, isMain, isMediaProperty, toggled } from "./face"

interface ValuesProps {
  properties: readonly PropertyAnswer[]
  face: Face
  onChange: (changes: Partial<Face>) => void
}

export function Values({ properties, face, onChange }: ValuesProps) {
  const shown = properties.filter((property) => !isMain(property))
  const put = (name: string, value: unknown) =>
    onChange({ overrides: { ...face.overrides, [name]: value ?? null } })
  return (
    <Panel title={words.values}>
      <p className="one-effect-lead">
        {shown.length === 0 ? words.noValues : `${words.valuesText} ${words.lockHint}`}
      </p>
      <ul className="one-effect-values">
        {shown.map((property) => (
          <li key={property.name} data-property={property.name}>
            <Value
              property={property}
              value={face.overrides[property.name]}
              onChange={(value) => put(property.name, value)}
            />
            <Check
              label={
                <>
                  {words.lock}
                  <span className="unseen"> {labelOf(property)}</span>
                </>
              }
              checked={face.locked.includes(property.name)}
              onChange={() => onChange({ locked: toggled(face.locked, property.name) })}
            />
          </li>
        ))}
      </ul>
    </Panel>
  )
}

interface ValueProps {
  property: PropertyAnswer
  value: unknown
  onChange: (value: unknown) => void
}

function Value({ property, value, onChange }: ValueProps) {
  if (isMediaProperty(property))
    return (
      <div className="field">
        <span className="field-label">{labelOf(property)}</span>
        <p className="field-hint">{words.customersFile}</p>
      </div>
    )
  const field = fieldOf(property)
  const hasOwn = value !== undefined && value !== null
  const isOther = hasOwn && JSON.stringify(value) !== JSON.stringify(property.default)
  return (
    <div className="one-effect-value">
      <OneField
        field={{ ...field, isRequired: true }}
        value={hasOwn ? value : field.initial}
        error={null}
        onChange={onChange}
      />
      {isOther && property.default !== null && (
        <p className="field-hint">
          {words.asWorkflow(cut(valueText(property.default), 60))}{" "}
          <Button kind="ghost" size="small" icon="undo" onClick={() => onChange(null)}>
            {words.takeOwn}
          </Button>
        </p>
      )}
    </div>
  )
}
