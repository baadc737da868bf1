/** Formats a document as YAML in the style of one written by hand. The control plane parses it,
 * because it supports all of YAML. */

import { type GraphDocument, SETTINGS } from "./document"

const PLAIN = /^[A-Za-z_/][\w ./()[\]-]*$/
/** Words that YAML would parse as booleans, null or numbers. */
const RESERVED = /^(?:true|false|yes|no|on|off|null|y|n|~|\.(?:inf|nan))$/i
const LINE_CHARACTERS_MAX = 110

export function yamlOf(document: GraphDocument): string {
  const lines = [`name: ${scalar(document.name)}`]
  for (const setting of SETTINGS)
    if (document[setting] !== undefined) lines.push(`${setting}: ${document[setting]}`)
  lines.push(document.nodes.length > 0 ? "nodes:" : "nodes: []")
  for (const node of document.nodes) lines.push(...nodeLines(node))
  lines.push(document.connections.length > 0 ? "connections:" : "connections: []")
  for (const { from, to } of document.connections) lines.push(`  - ${flow({ from, to })}`)
  return `${lines.join("\n")}\n`
}

/** Formats a node on one line if it fits, otherwise one line per field. */
function nodeLines(node: object): string[] {
  const short = `  - ${flow(node)}`
  if (short.length <= LINE_CHARACTERS_MAX) return [short]
  return Object.entries(node)
    .filter(([, value]) => value !== undefined)
    .map(([name, value], at) => `${at === 0 ? "  - " : "    "}${scalar(name)}: ${flow(value)}`)
}

function flow(value: unknown): string {
  if (Array.isArray(value)) return `[${value.map(flow).join(", ")}]`
  if (value === null || typeof value !== "object") return scalar(value, true)
  const fields = Object.entries(value).filter(([, inner]) => inner !== undefined)
  return `{${fields.map(([name, inner]) => `${scalar(name, true)}: ${flow(inner)}`).join(", ")}}`
}

function scalar(value: unknown, inside = false): string {
  if (typeof value !== "string") return JSON.stringify(value) ?? "null"
  const isPlain = PLAIN.test(value) && !RESERVED.test(value) && !value.endsWith(" ")
  if (isPlain && !(inside && /[[\]]/.test(value))) return value
  return JSON.stringify(value).replace(INVISIBLE, escaped)
}

/** Characters that YAML doesn't allow unescaped, and those that change the direction of
 * displayed text. */
const INVISIBLE = /[\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g

function escaped(sign: string): string {
  return `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`
}
