// Writes a .gz and a .br file next to every file that compresses well. The control plane serves
// these files and doesn't compress them itself.
import { readdirSync, readFileSync, statSync, writeFileSync } from "node:fs"
import { extname, join } from "node:path"
import { brotliCompressSync, constants, gzipSync } from "node:zlib"

const folder = process.env.COMFYFLEET_WEB_OUT ?? "dist"
const kinds = new Set([".js", ".css", ".html", ".svg", ".json"])

function filesOf(place) {
  return readdirSync(place).flatMap((name) => {
    const path = join(place, name)
    return statSync(path).isDirectory() ? filesOf(path) : [path]
  })
}

for (const path of filesOf(folder)) {
  if (!kinds.has(extname(path))) continue
  const bytes = readFileSync(path)
  const compressed = {
    ".gz": gzipSync(bytes, { level: 9 }),
    ".br": brotliCompressSync(bytes, {
      params: { [constants.BROTLI_PARAM_QUALITY]: 11, [constants.BROTLI_PARAM_SIZE_HINT]: bytes.length },
    }),
  }
  for (const [ending, smaller] of Object.entries(compressed))
    if (smaller.length < bytes.length * 0.95) writeFileSync(path + ending, smaller)
}
