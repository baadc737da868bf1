/** Stores which media a user has marked. The marks are kept in this browser, separately for each
 * user. */

const MARKS_MAX = 1000

export class Marks {
  private readonly key: string
  private readonly storage: Pick<Storage, "getItem" | "setItem"> | null
  private ids: readonly string[]
  private readonly listeners = new Set<() => void>()

  constructor(userId: string, storage: Pick<Storage, "getItem" | "setItem"> | null = ownStorage()) {
    this.key = `comfyfleet-marks-${userId}`
    this.storage = storage
    this.ids = this.read()
  }

  all = (): readonly string[] => this.ids

  toggle(id: string): void {
    const without = this.ids.filter((markedId) => markedId !== id)
    this.ids = without.length < this.ids.length ? without : [id, ...this.ids].slice(0, MARKS_MAX)
    try {
      this.storage?.setItem(this.key, JSON.stringify(this.ids))
    } catch {
      // The storage is full or blocked, so the marks last only as long as the page is open.
    }
    for (const listener of this.listeners) listener()
  }

  subscribe = (listener: () => void): (() => void) => {
    this.listeners.add(listener)
    return () => this.listeners.delete(listener)
  }

  private read(): readonly string[] {
    try {
      const stored: unknown = JSON.parse(this.storage?.getItem(this.key) ?? "[]")
      return Array.isArray(stored) ? stored.filter((id) => typeof id === "string").slice(0, MARKS_MAX) : []
    } catch {
      return []
    }
  }
}

function ownStorage(): Storage | null {
  try {
    return window.localStorage
  } catch {
    return null
  }
}
