/** A preview of the effect's card and form as customers see them, including unsaved changes. */

import { useState } from "react"
import type { AdminEffectAnswer, PropertyAnswer } from "@/api/schema"
import { previewOf } from "@/pages/catalogue/effects"
import { OneField } from "@/pages/effect/Fields"
import { isMedia } from "@/pages/effect/form"
import { PreviewMedia } from "@/pages/effects/PreviewMedia"
import { fieldOf } from "@/pages/workflows/draft"
import { Button, duration, Icon, Panel, tokens } from "@/ui"
import { WipePreview } from "@/ui/Wipe"
import { words as effectWords } from "@/words/en/effect"
import { words } from "@/words/en/effects"
import { customerProperties, type Face, isMain, listOf } from "./face"
import "@/pages/effect/effect.css"

interface CustomerViewProps {
  effect: AdminEffectAnswer
  properties: readonly PropertyAnswer[]
  face: Face
}

export function CustomerView({ effect, properties, face }: CustomerViewProps) {
  const main = properties.find(isMain)
  const price = Number(face.price) || 0
  return (
    <Panel title={words.asCustomer} className="one-effect-view">
      <p className="one-effect-lead">{words.asCustomerText}</p>
      <div className="one-effect-card">
        <Card effect={effect} title={face.title} />
        <div className="one-effect-caption">
          <strong>{face.title}</strong>
          <span className="mono faint">
            {tokens(price)}
            {effect.typical_seconds !== null && ` · ≈ ${duration(effect.typical_seconds)}`}
          </span>
        </div>
      </div>
      <div className="one-effect-sheet">
        <h3>{face.title}</h3>
        {face.description && <p className="quiet">{face.description}</p>}
        {face.tags.trim() !== "" && (
          <span className="row row-wrap">
            {listOf(face.tags).map((tag) => (
              <span key={tag} className="chip">
                {tag}
              </span>
            ))}
          </span>
        )}
        {main && (
          <div className="effect-drop">
            <Icon name="upload" />
            <span>{words.yourFile(effectWords.noun[main.type] ?? "file")}</span>
          </div>
        )}
        <Form properties={customerProperties(properties, face)} face={face} />
        <div className="one-effect-pay">
          <span>
            <strong>{tokens(price)}</strong>
            <span className="faint">{effectWords.nothingSpent}</span>
          </span>
          <Button kind="plain" offReason={words.onlyView}>
            {words.apply}
          </Button>
        </div>
      </div>
    </Panel>
  )
}

function Card({ effect, title }: { effect: AdminEffectAnswer; title: string }) {
  const preview = previewOf(effect)
  if (preview?.before)
    return (
      <WipePreview
        before={preview.before}
        after={preview.after}
        isVideo={preview.isVideo}
        alt={effectWords.shows(title)}
        ratio="4 / 5"
      />
    )
  return (
    <div className="print one-effect-blank">
      {preview ? (
        <PreviewMedia preview={preview} alt={effectWords.shows(title)} />
      ) : (
        <span aria-hidden="true">{title}</span>
      )}
    </div>
  )
}

/** A form for trying the settings. Its values aren't stored. */
function Form({ properties, face }: { properties: readonly PropertyAnswer[]; face: Face }) {
  const [values, setValues] = useState<Record<string, unknown>>({})
  if (properties.length === 0) return <p className="quiet">{words.noSettings}</p>
  return (
    <>
      {properties.map((property) => {
        const field = fieldOf(property, face.overrides[property.name])
        if (isMedia(field))
          return (
            <div key={property.name} className="field">
              <span className="field-label">{field.label}</span>
              <p className="field-hint">{words.customersFile}</p>
            </div>
          )
        return (
          <OneField
            // A new default value resets the field.
            key={`${property.name} ${JSON.stringify(field.initial)}`}
            field={field}
            value={values[`${property.name} ${JSON.stringify(field.initial)}`] ?? field.initial}
            error={null}
            onChange={(value) =>
              setValues((before) => ({
                ...before,
                [`${property.name} ${JSON.stringify(field.initial)}`]: value,
              }))
            }
          />
        )
      })}
    </>
  )
}
