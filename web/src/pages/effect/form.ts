/** Builds an effect's form from the JSON Schema of its properties. Pure functions. */

import { words } from "@/words/en/effect"

export type Kind =
  | "text"
  | "multiline"
  | "number"
  | "integer"
  | "boolean"
  | "choice"
  | "seed"
  | "colour"
  | "image"
  | "mask"
  | "video"
  | "audio"

export interface FormField {
  name: string
  label: string
  hint: string | null
  kind: Kind
  isRequired: boolean
  /** True if the value is a number rather than text. Colors may be either. */
  isNumber: boolean
  initial: unknown
  minimum: number | null
  maximum: number | null
  step: number | null
  lengthMax: number | null
  choices: readonly unknown[]
}

export type Values = Record<string, unknown>

type Schema = Record<string, unknown>

const KINDS = new Set<string>([
  "text",
  "multiline",
  "number",
  "integer",
  "boolean",
  "choice",
  "seed",
  "colour",
  "image",
  "mask",
  "video",
  "audio",
])
const MEDIA = new Set<Kind>(["image", "mask", "video", "audio"])
const NUMBERS = new Set<Kind>(["number", "integer", "seed"])
/** A range with more steps than this gets no slider, because it would be too hard to set. */
const SLIDER_STEPS_MAX = 1_000

export function isMedia(field: FormField): boolean {
  return MEDIA.has(field.kind)
}

export function fieldsOf(schema: Schema): FormField[] {
  const required = new Set(Array.isArray(schema.required) ? schema.required : [])
  const properties = (schema.properties ?? {}) as Record<string, Schema>
  return Object.entries(properties).map(([name, property]) => fieldOf(name, property, required.has(name)))
}

function fieldOf(name: string, schema: Schema, isRequired: boolean): FormField {
  const mediaKind = String(schema["x-kind"] ?? "")
  const kind = (KINDS.has(mediaKind) ? mediaKind : Array.isArray(schema.enum) ? "choice" : "text") as Kind
  return {
    name,
    label: typeof schema.title === "string" ? schema.title : name,
    hint: typeof schema.description === "string" ? schema.description : null,
    kind,
    isRequired,
    isNumber: schema.type === "number" || schema.type === "integer",
    initial: schema.default,
    minimum: numberOf(schema.minimum),
    maximum: numberOf(schema.maximum),
    step: numberOf(schema["x-step"]),
    lengthMax: numberOf(schema.maxLength),
    choices: Array.isArray(schema.enum) ? schema.enum : [],
  }
}

function numberOf(value: unknown): number | null {
  return typeof value === "number" && Number.isFinite(value) ? value : null
}

/** Checks whether a slider suits the field: its range has both ends, and few enough steps to set
 * by hand. */
export function isSlider(field: FormField): boolean {
  if (field.kind !== "number" && field.kind !== "integer") return false
  if (field.minimum === null || field.maximum === null || typeof field.initial !== "number") return false
  return (field.maximum - field.minimum) / stepOf(field) <= SLIDER_STEPS_MAX
}

export function stepOf(field: FormField): number {
  if (field.step !== null && field.step > 0) return field.step
  if (field.kind !== "number") return 1
  const range = (field.maximum ?? 1) - (field.minimum ?? 0)
  return range > 0 && range <= 10 ? 0.01 : 0.1
}

/** Returns the form's initial values. */
export function initialValues(fields: readonly FormField[]): Values {
  return Object.fromEntries(
    fields.map((field) => [field.name, field.initial ?? (field.kind === "boolean" ? false : undefined)]),
  )
}

/** Describes what is wrong with a value, or returns null if it is valid. */
export function mistakeOf(field: FormField, value: unknown): string | null {
  if (value === undefined || value === null || value === "")
    return field.isRequired ? missingValue(field) : null
  if (NUMBERS.has(field.kind)) return numberMistake(field, Number(value))
  if (typeof value === "string" && field.lengthMax !== null && value.length > field.lengthMax)
    return words.tooLong(field.lengthMax)
  return null
}

function missingValue(field: FormField): string {
  if (field.kind === "mask") return words.maskMissing
  return isMedia(field) ? words.fileMissing : words.missing
}

function numberMistake(field: FormField, value: number): string | null {
  if (!Number.isFinite(value)) return words.notANumber
  if (field.kind !== "number" && !Number.isInteger(value)) return words.notWhole
  const { minimum, maximum } = field
  const isOut = (minimum !== null && value < minimum) || (maximum !== null && value > maximum)
  return isOut ? words.range(minimum, maximum) : null
}

export function mistakesOf(fields: readonly FormField[], values: Values): Record<string, string> {
  const mistakes = fields.map((field) => [field.name, mistakeOf(field, values[field.name])] as const)
  return Object.fromEntries(mistakes.filter((entry): entry is readonly [string, string] => entry[1] !== null))
}

/** Returns the values to submit, without empty ones. */
export function propertiesOf(fields: readonly FormField[], values: Values): Values {
  const filled = fields
    .map((field) => [field.name, values[field.name]] as const)
    .filter(([, value]) => value !== undefined && value !== null && value !== "")
  return Object.fromEntries(filled)
}

/** Returns a random seed within the field's range and within the range of exact integers. */
export function randomSeed(field: FormField, random: () => number = Math.random): number {
  const low = Math.ceil(field.minimum ?? 0)
  const high = Math.min(field.maximum ?? 0xffffffff, 0xffffffff)
  return low + Math.floor(random() * (high - low + 1))
}

export function colorText(value: unknown): string {
  if (typeof value === "number") return `#${Math.max(0, value).toString(16).padStart(6, "0").slice(-6)}`
  return typeof value === "string" && /^#[0-9a-f]{6}$/i.test(value) ? value.toLowerCase() : "#000000"
}

export function colorValue(field: FormField, text: string): unknown {
  return field.isNumber ? Number.parseInt(text.slice(1), 16) : text
}

export interface Takes {
  kind: string
  media_types: readonly string[]
  max_bytes: number
}

/** Explains why a file can't be used, or returns null. The check runs before anything is
 * uploaded. */
export function fileMistake(file: { type: string; size: number }, takes: Takes): string | null {
  const type = file.type.toLowerCase()
  const isType = takes.media_types.length
    ? takes.media_types.includes(type)
    : type.startsWith(`${takes.kind}/`) && !type.startsWith("image/svg")
  if (!isType) return words.wrongType(typeNames(takes))
  if (file.size === 0) return words.emptyFile
  if (file.size > takes.max_bytes) return words.tooLarge(file.size, takes.max_bytes)
  return null
}

/** Explains why the service rejected a file's content, or returns null if there was another
 * reason. */
export function refusalOf(
  { details }: { details: Readonly<Record<string, unknown>> },
  kind: string,
): string | null {
  if (details.field !== "content_type") return null
  const detectedType = typeof details.found === "string" ? details.found : null
  return detectedType
    ? words.isOtherType(NAMES[detectedType] ?? detectedType)
    : words.isNothing(words.noun[kind] ?? "file")
}

const NAMES: Record<string, string> = {
  "image/jpeg": "JPEG",
  "image/png": "PNG",
  "image/webp": "WebP",
  "image/gif": "GIF",
  "video/mp4": "MP4",
  "video/webm": "WebM",
  "video/quicktime": "MOV",
  "audio/mpeg": "MP3",
  "audio/wav": "WAV",
}

/** Lists the accepted types, such as "JPEG, PNG", or names just the kind if all its types are
 * accepted. */
export function typeNames(takes: Takes): string {
  if (takes.media_types.length === 0) return words.anyOf(takes.kind)
  return takes.media_types.map((type) => NAMES[type] ?? type.split("/")[1]?.toUpperCase() ?? type).join(", ")
}

/** Returns the `accept` attribute for the browser's file picker. */
export function acceptOf(takes: Takes): string {
  return takes.media_types.length ? takes.media_types.join(",") : `${takes.kind}/*`
}
