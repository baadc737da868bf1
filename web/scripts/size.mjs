// Fails if the first page loads more than 100 KB of script (gzip). Prints the size that each page
// adds.
import { readFileSync } from "node:fs"
import { join } from "node:path"
import { gzipSync } from "node:zlib"

const folder = process.env.COMFYFLEET_WEB_OUT ?? "dist"
const ENTRY_BYTES_MAX = 100_000
const FIRST_PAGE = "src/pages/catalogue/index.tsx"
const manifest = JSON.parse(readFileSync(join(folder, "manifest.json"), "utf8"))

const sizes = new Map()
function sizeOf(file) {
  if (!sizes.has(file)) sizes.set(file, gzipSync(readFileSync(join(folder, file)), { level: 9 }).length)
  return sizes.get(file)
}

/** Returns the scripts that a module needs before it can run. */
function scriptsOf(key, scripts = new Set()) {
  const chunk = manifest[key]
  if (!chunk || scripts.has(chunk.file)) return scripts
  scripts.add(chunk.file)
  for (const imported of chunk.imports ?? []) scriptsOf(imported, scripts)
  return scripts
}

const total = (files) => [...files].reduce((sum, file) => sum + sizeOf(file), 0)
const entry = scriptsOf("index.html")
const first = new Set([...entry, ...scriptsOf(FIRST_PAGE)])
const kb = (bytes) => (bytes / 1000).toFixed(1).padStart(7)
const lines = Object.entries(manifest)
  .filter(([, chunk]) => chunk.isDynamicEntry)
  .map(([key]) => [key, total([...scriptsOf(key)].filter((file) => !entry.has(file)))])
  .sort((a, b) => b[1] - a[1])
const print = (text) => process.stdout.write(`${text}\n`)
print(`${kb(total(entry))} KB  entry`)
print(`${kb(total(first))} KB  first page: entry and catalogue (at most ${ENTRY_BYTES_MAX / 1000})`)
for (const [key, bytes] of lines) print(`${kb(bytes)} KB  + ${key}`)
if (total(first) > ENTRY_BYTES_MAX) {
  print("The first page is too large: load the parts that it doesn't need later.")
  process.exitCode = 1
}
