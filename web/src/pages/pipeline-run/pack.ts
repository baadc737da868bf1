/** Builds the files of an export. They have the same paths as in `comfyfleet pipeline export`. */

import { ApiError } from "@/api"
import type { PipelineRunAnswer } from "@/api/schema"
import { words } from "@/words/en/pipelines"
import { type Candidate, isPicture } from "./candidates"
import { Zip } from "./zip"

export interface Part {
  candidate: Candidate
  label: string
}

const FETCHES_MAX = 4
const SHEET_MAX = 200
const CELL = 192
const GAP = 8
const LABEL = 18
const COLUMNS_MAX = 8

export async function exportZip(
  run: PipelineRunAnswer,
  parts: readonly Part[],
  onDone: (count: number) => void,
  signal: AbortSignal,
): Promise<Blob> {
  const zip = new Zip()
  const small: { label: string; picture: ImageBitmap }[] = []
  let done = 0
  for (let from = 0; from < parts.length; from += FETCHES_MAX) {
    const some = parts.slice(from, from + FETCHES_MAX)
    const files = await Promise.all(some.map(({ candidate }) => fileOf(candidate, signal)))
    for (const [index, { candidate, label }] of some.entries()) {
      const file = files[index]
      if (!file) continue
      await zip.add(candidate.path, file, new Date(candidate.created_at))
      const picture = isPicture(candidate) && small.length < SHEET_MAX ? await scaledDown(file) : null
      if (picture)
        small.push({ label: `${label}  ${Math.round(candidate.score)}  ${candidate.status}`, picture })
      done += 1
      onDone(done)
    }
  }
  const now = new Date()
  await zip.add("index.json", indexOf(run, parts), now)
  if (small.length > 0) await zip.add("contact-sheet.png", await sheetOf(small), now)
  return zip.end()
}

/** Builds the export's index. Seeds are written with all their digits, because JavaScript numbers
 * would round them. */
export function indexOf(run: PipelineRunAnswer, parts: readonly Part[]): string {
  const candidates = parts.map(({ candidate: { urlAt: _, seed_text, ...facts } }) => ({
    ...facts,
    seed: seed_text === null ? null : `seed:${seed_text}`,
    url: null,
    file: facts.path,
  }))
  const text = JSON.stringify({ run, candidates }, null, 2)
  return text.replace(/^( +"seed": )"seed:(\d+)"/gm, "$1$2")
}

async function fileOf(candidate: Candidate, signal: AbortSignal): Promise<Blob> {
  if (candidate.url === null) return new Blob([candidate.text ?? ""], { type: "text/plain" })
  const answer = await fetch(candidate.url, { signal })
  if (!answer.ok) throw new ApiError("not_fetched", words.exports.failed(candidate.path), answer.status)
  return answer.blob()
}

/** Scales a picture down. Returns null if the browser can't decode the file as a picture. */
async function scaledDown(file: Blob): Promise<ImageBitmap | null> {
  try {
    const whole = await createImageBitmap(file)
    const part = Math.min(1, CELL / Math.max(whole.width, whole.height))
    const resizeWidth = Math.max(1, Math.round(whole.width * part))
    const resizeHeight = Math.max(1, Math.round(whole.height * part))
    const small = await createImageBitmap(whole, { resizeWidth, resizeHeight, resizeQuality: "high" })
    whole.close()
    return small
  } catch {
    return null
  }
}

async function sheetOf(pictures: readonly { label: string; picture: ImageBitmap }[]): Promise<Blob> {
  const columns = Math.min(COLUMNS_MAX, pictures.length)
  const height = CELL + LABEL + GAP
  const paper = new OffscreenCanvas(
    columns * (CELL + GAP) + GAP,
    Math.ceil(pictures.length / columns) * height + GAP,
  )
  const pen = paper.getContext("2d")
  if (!pen) throw new Error("no canvas")
  pen.fillStyle = "#101010"
  pen.fillRect(0, 0, paper.width, paper.height)
  pen.fillStyle = "#f3f3f3"
  pen.font = "12px monospace"
  for (const [index, { label, picture }] of pictures.entries()) {
    const x = GAP + (index % columns) * (CELL + GAP)
    const y = GAP + Math.floor(index / columns) * height
    pen.drawImage(picture, x, y)
    pen.fillText(label, x, y + CELL + LABEL - 5, CELL)
  }
  return paper.convertToBlob({ type: "image/png" })
}
