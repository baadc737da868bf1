/** Parses a backend's error: an exception as JSON, or plain text. */

export interface ReadError {
  /** The error's title, such as "PIL.UnidentifiedImageError: cannot identify image file". */
  readonly title: string | null
  readonly nodeId: string | null
  readonly nodeType: string | null
  /** The readable text, with one line per line of the traceback. */
  readonly text: string
}

function text(value: unknown): string | null {
  return typeof value === "string" && value.trim() !== "" ? value.trim() : null
}

function parsed(raw: string): Record<string, unknown> | null {
  try {
    const value: unknown = JSON.parse(raw)
    return value !== null && typeof value === "object" && !Array.isArray(value)
      ? (value as Record<string, unknown>)
      : null
  } catch {
    return null
  }
}

export function readError(raw: string): ReadError {
  const record = parsed(raw)
  if (!record) return { title: null, nodeId: null, nodeType: null, text: raw }
  const title =
    [text(record.exception_type), text(record.exception_message)].filter(Boolean).join(": ") || null
  const traceback = Array.isArray(record.traceback)
    ? record.traceback.map(String).join("")
    : text(record.traceback)
  const rest = Object.entries(record)
    .filter(([name]) => !["exception_type", "exception_message", "traceback"].includes(name))
    .map(([name, value]) => `${name}: ${typeof value === "string" ? value : JSON.stringify(value)}`)
  return {
    title,
    nodeId: text(record.node_id),
    nodeType: text(record.node_type),
    text: [title, traceback?.trimEnd(), rest.join("\n")].filter(Boolean).join("\n\n"),
  }
}
