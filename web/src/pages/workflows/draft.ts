/** The draft of a version: which inputs are exposed, with which names and ranges. Pure
 * functions. */

import type { PropertyAnswer, PropertyBody, SuggestedProperty } from "@/api/schema"
import type { FormField, Kind } from "@/pages/effect/form"
import { words } from "@/words/en/workflows"

export type PropertyType = PropertyBody["type"]
export type Format = NonNullable<PropertyBody["format"]>

export interface Exposed {
  /** Identifies the property even if its name changes. */
  key: string
  name: string
  label: string
  description: string
  type: PropertyType
  format: Format | null
  binding: string | null
  placeholder: string | null
  default: unknown
  minimum: number | null
  maximum: number | null
  step: number | null
  choices: readonly unknown[] | null
  /** Whether customers must set the property. Null means that only files and placeholders without
   * a default must be set. */
  required: boolean | null
}

const MEDIA = new Set<PropertyType>(["image", "video", "audio"])
const RANGED = new Set<PropertyType>(["number", "integer"])
/** The property that takes the customer's file. */
export const MAIN_INPUT = "input"

export function isMediaType(type: PropertyType): boolean {
  return MEDIA.has(type)
}

export function hasRange(type: PropertyType): boolean {
  return RANGED.has(type)
}

/** Returns the initial settings of a newly exposed input. */
export function exposedOf(suggested: SuggestedProperty, usedNames: ReadonlySet<string> = new Set()): Exposed {
  const isSeed = suggested.type === "seed"
  return {
    key: suggested.binding,
    name: freeName(suggested.name, usedNames),
    label: "",
    description: "",
    type: suggested.type,
    format: suggested.is_multiline && suggested.type === "text" ? "multiline" : null,
    binding: suggested.binding,
    placeholder: null,
    default: suggested.default ?? null,
    minimum: isSeed ? null : suggested.minimum,
    maximum: isSeed ? null : suggested.maximum,
    step: isSeed ? null : suggested.step,
    choices: suggested.type === "choice" ? suggested.choices : null,
    required: null,
  }
}

function freeName(base: string, usedNames: ReadonlySet<string>): string {
  let name = base
  for (let number = 2; usedNames.has(name); number += 1) name = `${base}_${number}`
  return name
}

export function exposedFromPrevious(property: PropertyAnswer): Exposed {
  return {
    key: property.binding ?? `placeholder ${property.placeholder}`,
    name: property.name,
    label: property.label ?? "",
    description: property.description,
    type: property.type,
    format: property.format as Format | null,
    binding: property.binding,
    placeholder: property.placeholder,
    default: property.default ?? null,
    minimum: property.minimum,
    maximum: property.maximum,
    step: property.step,
    choices: property.choices,
    required: property.required,
  }
}

/** Returns the previous version's properties whose inputs still exist, and the names of the
 * others. */
export function carriedOver(
  before: readonly PropertyAnswer[],
  suggested: readonly SuggestedProperty[],
): { kept: Exposed[]; lost: string[] } {
  const bindings = new Set(suggested.map((property) => property.binding))
  const isThere = (property: PropertyAnswer) => property.binding === null || bindings.has(property.binding)
  return {
    kept: before.filter(isThere).map(exposedFromPrevious),
    lost: before.filter((property) => !isThere(property)).map((property) => property.name),
  }
}

/** Builds the request body. A range that equals the node's own is left out. */
export function bodyOf(property: Exposed, suggested: SuggestedProperty | undefined): PropertyBody {
  const own = (name: "minimum" | "maximum" | "step") =>
    hasRange(property.type) && property[name] !== suggested?.[name] ? property[name] : null
  return {
    name: property.name.trim(),
    type: property.type,
    binding: property.binding,
    placeholder: property.placeholder,
    default: isMediaType(property.type) ? null : property.default,
    minimum: own("minimum"),
    maximum: own("maximum"),
    step: own("step"),
    choices: property.type === "choice" ? (property.choices as PropertyBody["choices"]) : null,
    required: property.required,
    description: property.description.trim(),
    label: property.label.trim() || null,
    format: property.format,
  }
}

const NAME = /^[A-Za-z_][A-Za-z0-9_.-]{0,99}$/
const SLUG = /^[a-z0-9][a-z0-9._-]{0,99}$/

/** Returns the mistakes by property key. */
export function mistakesOf(all: readonly Exposed[]): Record<string, string> {
  const mistakes: Record<string, string> = {}
  const names = new Set<string>()
  for (const property of all) {
    const name = property.name.trim()
    if (!NAME.test(name)) mistakes[property.key] = words.badName
    else if (names.has(name)) mistakes[property.key] = words.sameName
    else if (property.minimum !== null && property.maximum !== null && property.minimum > property.maximum)
      mistakes[property.key] = words.badRange
    else if (isOutside(property)) mistakes[property.key] = words.outside
    names.add(name)
  }
  return mistakes
}

function isOutside({ default: value, minimum, maximum, type }: Exposed): boolean {
  if (!hasRange(type) || typeof value !== "number") return false
  return (minimum !== null && value < minimum) || (maximum !== null && value > maximum)
}

export function isSlug(text: string): boolean {
  return SLUG.test(text)
}

/** Derives an identifier from a file name or a title. */
export function slugOf(text: string): string {
  return text
    .replace(/\.(json|png|webp|jpe?g|gif|mp4|webm|mov|flac|mp3|svg|avif)$/i, "")
    .normalize("NFKD")
    .toLowerCase()
    .replace(/[^a-z0-9._-]+/g, "-")
    .replace(/^[^a-z0-9]+|-+$/g, "")
    .slice(0, 100)
}

/** Returns the property's label, with the same rule as the control plane. */
export function labelOf(property: { label: string | null; name: string }): string {
  if (property.label) return property.label
  const text = property.name.replaceAll("_", " ").trim()
  return text.charAt(0).toUpperCase() + text.slice(1).toLowerCase()
}

type FormProperty = Pick<
  Exposed,
  "name" | "description" | "type" | "default" | "minimum" | "maximum" | "step" | "choices"
> & { label: string | null; format: string | null; required: boolean | null }

/** Converts a property to a field of the effect's form. */
export function fieldOf(property: FormProperty, value: unknown = null): FormField {
  const initial = value ?? property.default ?? undefined
  return {
    name: property.name,
    label: labelOf(property),
    hint: property.description || null,
    kind: (property.format ?? property.type) as Kind,
    isRequired: Boolean(property.required) && initial === undefined && property.type !== "seed",
    isNumber: property.type === "number" || property.type === "integer",
    initial,
    minimum: property.minimum,
    maximum: property.maximum,
    step: property.step,
    lengthMax: null,
    choices: property.choices ?? [],
  }
}

/** Moves a property one position up or down in the form. */
export function moved<T>(all: readonly T[], at: number, by: -1 | 1): T[] {
  const to = at + by
  const next = [...all]
  const [one] = next.splice(at, 1)
  if (one === undefined || to < 0 || to >= all.length) return [...all]
  next.splice(to, 0, one)
  return next
}

/** Builds an input from its address, for the drawing of a registered workflow. */
export function inputAt(address: string, value: unknown): SuggestedProperty {
  const dot = address.indexOf(".")
  const [node_id, input] = [address.slice(0, dot), address.slice(dot + 1)]
  return {
    name: input,
    type: "text",
    binding: address,
    node_id,
    node_title: "",
    path: [],
    input,
    value,
    default: value,
    minimum: null,
    maximum: null,
    step: null,
    choices: null,
    is_multiline: false,
    role: null,
  }
}
