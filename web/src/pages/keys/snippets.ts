/** Builds example programs with the user's server address and effect. A browser test runs them. */

import type { EffectAnswer } from "@/api/schema"

export type Language = "curl" | "python" | "javascript" | "comfyui"

export type SnippetEffect = Pick<EffectAnswer, "id" | "slug"> & { takes: { kind: string } | null }

const FILES: Record<string, [name: string, type: string]> = {
  image: ["photo.png", "image/png"],
  video: ["clip.mp4", "video/mp4"],
  audio: ["sound.wav", "audio/wav"],
}

function fileOf(effect: SnippetEffect): [string, string] {
  return FILES[effect.takes?.kind ?? ""] ?? ["photo.png", "image/png"]
}

export function snippet(language: Language, url: string, effect: SnippetEffect): string {
  if (language === "curl") return curl(url, effect)
  if (language === "python") return python(url, effect)
  if (language === "javascript") return javascript(url, effect)
  return comfyui(url)
}

function curl(url: string, effect: SnippetEffect): string {
  const [name, type] = fileOf(effect)
  const start = `URL=${url}
call() { curl -sS --fail-with-body -H "Authorization: Bearer $COMFYFLEET_KEY" -H "Content-Type: application/json" "$@"; }
`
  const upload = `
# create the upload, send the file, and register it as media
SIZE=$(($(wc -c < ${name})))
UPLOAD=$(call $URL/api/videos/uploads -d '{"filename": "${name}", "content_type": "${type}", "size": '$SIZE'}')
echo "$UPLOAD" | jq -r '.upload.headers | to_entries[] | "\\(.key): \\(.value)"' |
  curl -sS --fail -H @- -T ${name} "$(echo "$UPLOAD" | jq -r .upload.url)"
MEDIA=$(call $URL/api/videos -d '{"file_id": '$(echo "$UPLOAD" | jq .file_id)'}' | jq .id)
`
  const body = effect.takes
    ? `'{"effect_id": "${effect.id}", "video_id": '$MEDIA'}'`
    : `'{"effect_id": "${effect.id}"}'`
  return `${start}${effect.takes ? upload : ""}
# apply ${effect.slug}, and wait up to a minute for the result
call "$URL/api/ai-jobs?wait=60" -d ${body}
`
}

function python(url: string, effect: SnippetEffect): string {
  const [name] = fileOf(effect)
  const apply = effect.takes
    ? `        media = await client.upload(Path("${name}"), effect="${effect.slug}")
        job = await client.apply("${effect.slug}", media)`
    : `        job = await client.apply("${effect.slug}")`
  return `# pip install comfyfleet
import asyncio
import os
from pathlib import Path

from comfyfleet.client import Client


async def main() -> None:
    async with Client("${url}", os.environ["COMFYFLEET_KEY"]) as client:
${apply}
        await job.wait(timeout_seconds=600)
        print(*await job.download(Path("results")), sep="\\n")


asyncio.run(main())
`
}

function javascript(url: string, effect: SnippetEffect): string {
  const [name, type] = fileOf(effect)
  const files = effect.takes ? "readFile, writeFile" : "writeFile"
  const upload = `
const file = await readFile("${name}")
const { file_id, upload } = await call("/api/videos/uploads", { filename: "${name}", content_type: "${type}", size: file.length })
await fetch(upload.url, { method: upload.method, headers: upload.headers, body: file })
const media = await call("/api/videos", { file_id })
`
  const body = effect.takes
    ? `{ effect_id: "${effect.id}", video_id: media.id }`
    : `{ effect_id: "${effect.id}" }`
  return `// Node 20 or newer, as an .mjs file
import { ${files} } from "node:fs/promises"

const headers = { authorization: \`Bearer \${process.env.COMFYFLEET_KEY}\`, "content-type": "application/json" }
async function call(path, body) {
  const answer = await fetch("${url}" + path, { method: "POST", headers, body: JSON.stringify(body) })
  const result = await answer.json()
  if (!answer.ok) throw new Error(result.error.message)
  return result
}
${effect.takes ? upload : ""}
const job = await call("/api/ai-jobs?wait=60", ${body})
if (job.status !== "completed") throw new Error(job.error ?? job.status)
for (const { filename, url } of job.outputs) {
  await writeFile(filename, Buffer.from(await (await fetch(url)).arrayBuffer()))
  console.log(filename)
}
`
}

function comfyui(url: string): string {
  return `# use this address in programs that ask for ComfyUI's address
echo ${url}/k/$COMFYFLEET_KEY

# or send the key in a header
curl -sS --fail-with-body -H "Authorization: Bearer $COMFYFLEET_KEY" ${url}/queue
`
}
