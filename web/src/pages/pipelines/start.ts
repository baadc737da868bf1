/** Collects the numbers and variables for starting a pipeline run. */

const WHOLE = /^[1-9]\d{0,14}$/
const TEMPLATE = /\{\{\s*variables\.([\p{L}_][\p{L}\p{N}_]*)\s*\}\}/gu

export function isWhole(text: string): boolean {
  return WHOLE.test(text.trim())
}

/** Parses a limit. Returns null, which means no limit, if the text is not a whole number. */
export function numberOf(text: string): number | null {
  return isWhole(text) ? Number(text.trim()) : null
}

/** Returns the variables in the order of their first occurrence in the document. */
export function variablesOf(document: unknown): string[] {
  const variables = new Set<string>()
  const look = (value: unknown): void => {
    if (typeof value === "string") for (const [, name] of value.matchAll(TEMPLATE)) variables.add(name ?? "")
    else if (Array.isArray(value)) value.forEach(look)
    else if (value !== null && typeof value === "object") Object.values(value).forEach(look)
  }
  look(document)
  return [...variables]
}

const WHOLE_NAME = /^\s*\{\{\s*variables\.([\p{L}_][\p{L}\p{N}_]*)\s*\}\}\s*$/u
const MEDIA = new Set(["image", "video", "audio"])

type Offer = { kind: string; name: string; properties: readonly { name: string; type: string }[] }

/** Returns the variables that a step takes as files, with their kinds. Files are picked instead
 * of typed. */
export function filesOf(document: Record<string, unknown>, offers: readonly Offer[]): Map<string, string> {
  const steps = Array.isArray(document.steps) ? (document.steps as Record<string, unknown>[]) : []
  const files = new Map<string, string>()
  const judges = steps.map((step) => step.judge as Record<string, unknown> | undefined)
  for (const step of [...steps, ...judges.filter((judge) => judge !== undefined && judge !== null)]) {
    const [kind, name] = step.effect ? ["effect", step.effect] : ["workflow", step.workflow]
    const offer = offers.find((offer) => offer.kind === kind && offer.name === name)
    for (const [property, template] of Object.entries(step.properties ?? {})) {
      const type = offer?.properties.find((item) => item.name === property)?.type ?? ""
      const variable = typeof template === "string" ? WHOLE_NAME.exec(template)?.[1] : undefined
      if (variable && MEDIA.has(type)) files.set(variable, type)
    }
  }
  return files
}

/** Parses a value in the same way as the command line: as JSON if it is valid JSON, otherwise as
 * text. */
export function readValue(text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    return text
  }
}

export interface StepFacts {
  name: string
  work: string
  children: number
  keep: number | null
  needsApproval: boolean
  /** The name of the candidates' judge. */
  judge: string | null
}

/** Returns the steps of a document that the control plane has accepted. */
export function stepsOf(document: Record<string, unknown>): StepFacts[] {
  const steps = Array.isArray(document.steps) ? document.steps : []
  return steps.map((step: Record<string, unknown>) => ({
    name: String(step.name ?? ""),
    work: String(step.effect ?? step.workflow ?? ""),
    children: Number(step.children_per_parent ?? 1),
    keep: step.keep === undefined || step.keep === null ? null : Number(step.keep),
    needsApproval: step.needs_approval === true,
    judge: judgeOf(step.judge),
  }))
}

function judgeOf(judge: unknown): string | null {
  if (judge === null || typeof judge !== "object") return null
  const { measure, effect, workflow } = judge as Record<string, unknown>
  return String(measure ?? effect ?? workflow ?? "")
}
