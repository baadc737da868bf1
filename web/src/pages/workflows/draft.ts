/** The draft of a version: which inputs are exposed, with which names and ranges. Pure
 * functions. */

import type { PropertyAnswer, PropertyBody, SuggestedProperty } from "@/api/schema"
import type { FormField, Kind } from "@/pages/effect/form"
import { words } from "@/words/en/workflows"

export type PropertyType = PropertyBody["type"]
export type Format = NonNullable<PropertyBody["format"]>

export interface Exposed {
  /** Stays the same if the name is changed. */
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
  /** Null means the default for the property's type. */
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
export function exposedOf(given: SuggestedProperty, taken: ReadonlySet<string> = new Set()): Exposed {
  const isSeed = given.type === "seed"
  return {
    key: given.binding,
    name: freeName(given.name, taken),
    label: "",
    description: "",
    type: given.type,
    format: given.is_multiline && given.type === "text" ? "multiline" : null,
    binding: given.binding,
    placeholder: null,
    default: given.default ?? null,
    minimum: isSeed ? null : given.minimum,
    maximum: isSeed ? null : given.maximum,
    step: isSeed ? null : given.step,
    choices: given.type === "choice" ? given.choices : null,
    required: null,
  }
}

function freeName(wanted: string, taken: ReadonlySet<string>): string {
  let name = wanted
  for (let number = 2; taken.has(name); number += 1) name = `${wanted}_${number}`
  return name
}

export function exposedBefore(given: PropertyAnswer): Exposed {
  return {
    key: given.binding ?? `placeholder ${given.placeholder}`,
    name: given.name,
    label: given.label ?? "",
    description: given.description,
    type: given.type,
    format: given.format as Format | null,
    binding: given.binding,
    placeholder: given.placeholder,
    default: given.default ?? null,
    minimum: given.minimum,
    maximum: given.maximum,
    step: given.step,
    choices: given.choices,
    required: given.required,
  }
}

/** Returns the previous version's properties whose inputs still exist, and the names of the
 * others. */
export function takenOver(
  before: readonly PropertyAnswer[],
  suggested: readonly SuggestedProperty[],
): { kept: Exposed[]; lost: string[] } {
  const there = new Set(suggested.map((each) => each.binding))
  const isThere = (each: PropertyAnswer) => each.binding === null || there.has(each.binding)
  return {
    kept: before.filter(isThere).map(exposedBefore),
    lost: before.filter((each) => !isThere(each)).map((each) => each.name),
  }
}

/** Builds the request body. A range that equals the node's own is left out. */
export function bodyOf(each: Exposed, suggested: SuggestedProperty | undefined): PropertyBody {
  const own = (name: "minimum" | "maximum" | "step") =>
    hasRange(each.type) && each[name] !== suggested?.[name] ? each[name] : null
  return {
    name: each.name.trim(),
    type: each.type,
    binding: each.binding,
    placeholder: each.placeholder,
    default: isMediaType(each.type) ? null : each.default,
    minimum: own("minimum"),
    maximum: own("maximum"),
    step: own("step"),
    choices: each.type === "choice" ? (each.choices as PropertyBody["choices"]) : null,
    required: each.required,
    description: each.description.trim(),
    label: each.label.trim() || null,
    format: each.format,
  }
}

const NAME = /^[A-Za-z_][A-Za-z0-9_.-]{0,99}$/
const SLUG = /^[a-z0-9][a-z0-9._-]{0,99}$/

/** Returns the mistakes by property key. */
export function mistakesOf(all: readonly Exposed[]): Record<string, string> {
  const found: Record<string, string> = {}
  const names = new Set<string>()
  for (const each of all) {
    const name = each.name.trim()
    if (!NAME.test(name)) found[each.key] = words.badName
    else if (names.has(name)) found[each.key] = words.sameName
    else if (each.minimum !== null && each.maximum !== null && each.minimum > each.maximum)
      found[each.key] = words.badRange
    else if (isOutside(each)) found[each.key] = words.outside
    names.add(name)
  }
  return found
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
export function labelOf(each: { label: string | null; name: string }): string {
  if (each.label) return each.label
  const text = each.name.replaceAll("_", " ").trim()
  return text.charAt(0).toUpperCase() + text.slice(1).toLowerCase()
}

type Asked = Pick<
  Exposed,
  "name" | "description" | "type" | "default" | "minimum" | "maximum" | "step" | "choices"
> & { label: string | null; format: string | null; required: boolean | null }

/** Converts a property to a field of the effect's form. */
export function fieldOf(each: Asked, value: unknown = null): FormField {
  const initial = value ?? each.default ?? undefined
  return {
    name: each.name,
    label: labelOf(each),
    hint: each.description || null,
    kind: (each.format ?? each.type) as Kind,
    isRequired: Boolean(each.required) && initial === undefined && each.type !== "seed",
    isNumber: each.type === "number" || each.type === "integer",
    initial,
    minimum: each.minimum,
    maximum: each.maximum,
    step: each.step,
    lengthMax: null,
    choices: each.choices ?? [],
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
