/** Shows times relative to now, with the exact time in the user's time zone on hover. One timer
 * updates all of them. */

import { useSyncExternalStore } from "react"

const relative = new Intl.RelativeTimeFormat(undefined, { numeric: "auto", style: "short" })
const exact = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" })
const UNITS: readonly [Intl.RelativeTimeFormatUnit, number][] = [
  ["year", 31_536_000],
  ["month", 2_592_000],
  ["day", 86_400],
  ["hour", 3_600],
  ["minute", 60],
  ["second", 1],
]

/** Describes a moment relative to now. Future times are rounded, so that a link created for
 * seven days expires in seven days and not in six. */
export function relativeTime(moment: Date, now: Date): string {
  const seconds = Math.round((moment.getTime() - now.getTime()) / 1000)
  const isFuture = seconds > 0
  const [unit, size] = UNITS.find(([, size]) => (isFuture ? seconds / size > 0.95 : -seconds >= size)) ?? [
    "second",
    1,
  ]
  return relative.format(isFuture ? Math.round(seconds / size) : Math.trunc(seconds / size), unit)
}

export function exactTime(moment: Date): string {
  return exact.format(moment)
}

const TICK_MS = 5_000
let tick = Date.now()
const listeners = new Set<() => void>()
let timer: ReturnType<typeof setInterval> | null = null

function subscribe(listener: () => void): () => void {
  listeners.add(listener)
  // The tick is outdated, because the timer was stopped while there were no listeners.
  if (timer === null) tick = Date.now()
  timer ??= setInterval(() => {
    tick = Date.now()
    for (const listener of listeners) listener()
  }, TICK_MS)
  return () => {
    listeners.delete(listener)
    if (listeners.size === 0 && timer) {
      clearInterval(timer)
      timer = null
    }
  }
}

/** Returns the current time, which is updated every few seconds. */
export function useNow(): Date {
  return new Date(useSyncExternalStore(subscribe, () => tick))
}

export function Time({ at }: { at: string | Date }) {
  const now = useNow()
  const moment = typeof at === "string" ? new Date(at) : at
  // Clocks may differ, so a moment that has just passed must not appear to be in the future.
  const shown = Math.abs(moment.getTime() - now.getTime()) < TICK_MS ? now : moment
  return (
    <time dateTime={moment.toISOString()} title={exactTime(moment)} className="time">
      {relativeTime(shown, now)}
    </time>
  )
}
