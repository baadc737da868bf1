/** Builds cron schedules from a few choices, and describes them in words. A schedule that is too
 * complex for words is shown as written. Pure functions. */

import { words } from "@/words/en/triggers"

export const RHYTHMS = ["hourly", "daily", "weekdays", "weekly", "monthly", "own"] as const
export type Rhythm = (typeof RHYTHMS)[number]

export interface Plan {
  readonly rhythm: Rhythm
  /** The time as HH:MM. For an hourly schedule, only the minutes count. */
  readonly time: string
  /** The weekday of a weekly schedule, from SUN to SAT. */
  readonly day: string
}

export const DAYS = ["MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN"] as const

/** Returns the five cron fields, or null if the user writes them. */
export function cronOf({ rhythm, time, day }: Plan): string | null {
  const [hour = 0, minute = 0] = time.split(":").map(Number)
  const at = `${minute} ${hour}`
  if (rhythm === "hourly") return `${minute} * * * *`
  if (rhythm === "daily") return `${at} * * *`
  if (rhythm === "weekdays") return `${at} * * MON-FRI`
  if (rhythm === "weekly") return `${at} * * ${day}`
  return rhythm === "monthly" ? `${at} 1 * *` : null
}

export function inWords(cron: string): string {
  const [minute = "", hour = "", date = "", month = "", day = ""] = cron.trim().toUpperCase().split(/\s+/)
  if (month !== "*") return cron
  const days = daysInWords(date, day)
  const every = /^\*\/(\d+)$/.exec(minute)
  if (every && hour === "*") return days && join(words.everyMinutes(Number(every[1])), date, day, days)
  if (!/^\d+$/.test(minute)) return cron
  const hours = /^\*\/(\d+)$/.exec(hour)
  if (hours && days) return join(words.everyHours(Number(hours[1]), twoDigits(minute)), date, day, days)
  if (hour === "*" && days) return join(words.everyHour(twoDigits(minute)), date, day, days)
  if (!/^\d+(,\d+)*$/.test(hour) || !days) return cron
  const times = hour.split(",").map((time) => `${twoDigits(time)}:${twoDigits(minute)}`)
  return words.daysAt(days, times.join(", "))
}

/** Adds the days to a schedule that repeats throughout the day, unless it runs every day. */
function join(time: string, date: string, day: string, days: string): string {
  return date === "*" && day === "*" ? time : `${time}, ${days}`
}

function twoDigits(text: string): string {
  return text.padStart(2, "0")
}

/** Describes the days, or returns an empty text if they are too complex for words. */
function daysInWords(date: string, day: string): string {
  if (date === "*" && day === "*") return words.everyDay
  if (day === "*" && /^\d+$/.test(date)) return words.dayOfMonth(Number(date))
  if (day === "*" && date === "L") return words.lastDay
  if (date !== "*") return ""
  if (day === "MON-FRI" || day === "1-5") return words.onWeekdays
  const names = day.split(",").map((part) => words.days[dayKey(part)])
  return names.every((name) => name) ? words.on(names.join(", ")) : ""
}

function dayKey(day: string): string {
  const number = /^[0-7]$/.test(day) ? Number(day) : null
  return number === null ? day : (DAYS[(number + 6) % 7] ?? "")
}

/** Formats a moment as local time in a time zone. */
export function momentIn(moment: string, timezone: string): string {
  const shown = new Intl.DateTimeFormat("en-GB", {
    weekday: "short",
    day: "numeric",
    month: "short",
    hour: "2-digit",
    minute: "2-digit",
    timeZone: timezone,
  })
  return shown.format(new Date(moment))
}

/** Parses a typed input as JSON, or returns it as text if it isn't valid JSON. */
export function inputOf(text: string): unknown {
  try {
    return JSON.parse(text)
  } catch {
    return text
  }
}
