/** Converts an effect's settings between the form and the API. Pure functions. */

import type { AdminEffectAnswer, FaceBody, PropertyAnswer } from "@/api/schema"
import { words } from "@/words/en/effects"

export interface Face {
  title: string
  description: string
  tags: string
  price: string
  upload: string
  mediaTypes: string
  stage: string
  keepMetadata: boolean
  reuse: boolean
  overrides: Readonly<Record<string, unknown>>
  locked: readonly string[]
}

const MEGABYTE = 1_000_000
const MAIN = "input"
const MEDIA = new Set(["image", "video", "audio"])

export function isMediaProperty(property: PropertyAnswer): boolean {
  return MEDIA.has(property.type)
}

/** Checks whether a property is the file that the effect is applied to. */
export function isMain(property: PropertyAnswer): boolean {
  return property.name === MAIN && isMediaProperty(property)
}

export function faceOf(effect: AdminEffectAnswer): Face {
  return {
    title: effect.title,
    description: effect.description,
    tags: effect.tags.join(", "),
    price: String(effect.price_tokens),
    upload: effect.max_upload_bytes === null ? "" : String(effect.max_upload_bytes / MEGABYTE),
    mediaTypes: effect.media_types.join(", "),
    stage: effect.stage,
    keepMetadata: effect.keep_metadata,
    reuse: effect.reuse,
    overrides: effect.overrides,
    locked: effect.locked,
  }
}

export function listOf(text: string): string[] {
  const items = text.split(",").map((item) => item.trim().toLowerCase())
  return [...new Set(items.filter((item) => item !== ""))]
}

export function bodyOf(face: Face): FaceBody {
  const overrides = Object.entries(face.overrides).filter(
    ([, value]) => value !== undefined && value !== null,
  )
  return {
    title: face.title.trim(),
    description: face.description.trim(),
    tags: listOf(face.tags),
    price_tokens: Number(face.price),
    max_upload_bytes: face.upload.trim() === "" ? null : Math.round(Number(face.upload) * MEGABYTE),
    media_types: listOf(face.mediaTypes),
    stage: face.stage.trim(),
    keep_metadata: face.keepMetadata,
    reuse: face.reuse,
    overrides: Object.fromEntries(overrides),
    locked: [...face.locked],
  }
}

export function isChanged(face: Face, effect: AdminEffectAnswer): boolean {
  return JSON.stringify(bodyOf(face)) !== JSON.stringify(bodyOf(faceOf(effect)))
}

export type Mistakes = Partial<Record<"title" | "price" | "upload", string>>

export function mistakesOf(face: Face): Mistakes {
  const mistakes: Mistakes = {}
  const price = Number(face.price)
  const upload = Number(face.upload)
  if (face.title.trim() === "") mistakes.title = words.nameMissing
  if (face.price.trim() === "" || !Number.isInteger(price) || price < 0) mistakes.price = words.badPrice
  if (face.upload.trim() !== "" && !(upload > 0)) mistakes.upload = words.badUpload
  return mistakes
}

export function toggled(all: readonly string[], one: string): string[] {
  return all.includes(one) ? all.filter((item) => item !== one) : [...all, one]
}

/** Returns the properties that customers can set, in the order of the form. */
export function customerProperties(properties: readonly PropertyAnswer[], face: Face): PropertyAnswer[] {
  return properties.filter((property) => !isMain(property) && !face.locked.includes(property.name))
}

/** Unsaved settings by effect, kept while the tab is open. */
const unsaved = new Map<string, Face>()

export function unsavedOf(slug: string): Face | null {
  return unsaved.get(slug) ?? null
}

export function keepUnsaved(slug: string, face: Face | null): void {
  if (face) unsaved.set(slug, face)
  else unsaved.delete(slug)
}
