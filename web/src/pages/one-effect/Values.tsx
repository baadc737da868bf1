/** Sets the values of the workflow's properties: defaults in the customer's form, and fixed
 * values. */

import type { PropertyAnswer } from "@/api/schema"
import { OneField } from "@/pages/effect/Fields"
import { fieldOf, labelOf } from "@/pages/workflows/draft"
import { cut, told } from "@/pages/workflows/layout"
import { Button, Check, Panel } from "@/ui"
import { words } from "@/words/en/effects"
import { type Face, isMain, isMediaProperty, toggled } from "./face"

interface ValuesProps {
  properties: readonly PropertyAnswer[]
  face: Face
  onChange: (given: Partial<Face>) => void
}

export function Values({ properties, face, onChange }: ValuesProps) {
  const shown = properties.filter((each) => !isMain(each))
  const put = (name: string, value: unknown) =>
    onChange({ overrides: { ...face.overrides, [name]: value ?? null } })
  return (
    <Panel title={words.values}>
      <p className="one-effect-lead">
        {shown.length === 0 ? words.noValues : `${words.valuesText} ${words.lockHint}`}
      </p>
      <ul className="one-effect-values">
        {shown.map((each) => (
          <li key={each.name} data-property={each.name}>
            <Value
              property={each}
              value={face.overrides[each.name]}
              onChange={(value) => put(each.name, value)}
            />
            <Check
              label={
                <>
                  {words.lock}
                  <span className="unseen"> {labelOf(each)}</span>
                </>
              }
              checked={face.locked.includes(each.name)}
              onChange={() => onChange({ locked: toggled(face.locked, each.name) })}
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
          {words.asWorkflow(cut(told(property.default), 60))}{" "}
          <Button kind="ghost" size="small" icon="undo" onClick={() => onChange(null)}>
            {words.takeOwn}
          </Button>
        </p>
      )}
    </div>
  )
}
