/** Prepares effects for the catalog. */

import type { EffectAnswer, PublicEffects } from "@/api/schema"

export type Effect = EffectAnswer
export type Effects = PublicEffects

export interface Preview {
  before: string | null
  after: string
  isVideo: boolean
}

export function tagsOf(effects: readonly Effect[]): string[] {
  return [...new Set(effects.flatMap((effect) => effect.tags))].sort((a, b) => a.localeCompare(b))
}

/** Checks whether every word of the text occurs in the effect's title, description or tags. */
export function fits(effect: Effect, text: string, tag: string | null): boolean {
  if (tag !== null && !effect.tags.includes(tag)) return false
  const all = [effect.title, effect.slug, effect.description, ...effect.tags].join(" ").toLocaleLowerCase()
  return text
    .toLocaleLowerCase()
    .split(/\s+/)
    .every((word) => all.includes(word))
}

/** Returns the effect's preview. Pictures on other hosts are left out, because the page loads
 * nothing from other sites. */
export function previewOf(
  effect: Pick<Effect, "examples" | "preview_url">,
  origin = window.location.origin,
): Preview | null {
  const { before, after } = effect.examples[0] ?? {}
  const kind = after && kindOf(after)
  if (after && (kind === "image" || kind === "video"))
    // A picture and a video can't be compared by overlaying them, so only the result is shown.
    return {
      before: before && kindOf(before) === kind ? before.url : null,
      after: after.url,
      isVideo: kind === "video",
    }
  const url = effect.preview_url
  if (!url) return null
  const isOurs = url.startsWith("/") ? !url.startsWith("//") : url.startsWith(`${origin}/`)
  return isOurs ? { before: null, after: url, isVideo: false } : null
}

/** Moves the first effect with a preview to the front, where it is shown larger. Returns null if
 * there are too few effects for that. */
export function withPreviewFirst(effects: readonly Effect[], origin?: string): Effect[] | null {
  const lead = effects.length > 3 ? effects.find((effect) => previewOf(effect, origin)) : undefined
  return lead ? [lead, ...effects.filter((effect) => effect !== lead)] : null
}

function kindOf(file: { content_type: string }): string {
  return file.content_type.split("/")[0] ?? ""
}
