/** Formats tokens, sizes, durations and counts for display. */

import { words } from "@/words/en/common"
import { Icon } from "./Icon"

// Omits the minus sign of a negative zero.
const whole = new Intl.NumberFormat(undefined, { signDisplay: "negative" })
const short = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 })
const SIZES = ["B", "KB", "MB", "GB", "TB"]

export function count(value: number): string {
  return whole.format(value)
}

export function tokens(value: number): string {
  return words.tokens(value, whole.format(value))
}

export function bytes(value: number): string {
  const power = Math.min(SIZES.length - 1, value < 1 ? 0 : Math.floor(Math.log(value) / Math.log(1000)))
  return `${short.format(value / 1000 ** power)} ${SIZES[power]}`
}

/** Formats a duration, such as 0.4 s, 12 s, 1 min 20 s or 3 h 5 min. */
export function duration(seconds: number): string {
  if (seconds < 10) return `${short.format(seconds)} s`
  if (seconds < 60) return `${Math.round(seconds)} s`
  if (seconds < 3600) return pair(seconds, 60, "min", 1, "s")
  if (seconds < 172_800) return pair(seconds, 3600, "h", 60, "min")
  return pair(seconds, 86_400, "d", 3600, "h")
}

function pair(seconds: number, large: number, name: string, small: number, rest: string): string {
  const first = Math.floor(seconds / large)
  const second = Math.floor((seconds % large) / small)
  return second ? `${first} ${name} ${second} ${rest}` : `${first} ${name}`
}

export function percent(part: number): string {
  return `${short.format(part)}%`
}

/** An amount of tokens. With `sign`, positive amounts get a plus sign, as in a list of
 * transactions. */
export function Tokens({
  value,
  sign = false,
  icon = false,
}: {
  value: number
  sign?: boolean
  icon?: boolean
}) {
  const amount = whole.format(Math.abs(value))
  const before = sign ? (value < 0 ? "−" : "+") : value < 0 ? "−" : ""
  return (
    <span className="tokens">
      {icon && <Icon name="token" />}
      <b>
        {before}
        {amount}
      </b>
      <span className="tokens-word"> {words.tokenWord(value)}</span>
    </span>
  )
}
