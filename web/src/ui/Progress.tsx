/** A progress bar. `value` is between 0 and 1. Null means unknown. */

interface ProgressProps {
  label: string
  value: number | null
  state?: "running" | "succeeded" | "failed" | "ink"
  /** True if the percentage is shown next to the bar. */
  withPercent?: boolean
}

export function Progress({ label, value, state = "running", withPercent = false }: ProgressProps) {
  const part = value === null ? null : Math.max(0, Math.min(1, value))
  const text = part === null ? "" : `${Math.floor(part * 100)}%`
  return (
    <div className="progress">
      <div
        className={`bar bar-${state}${part === null ? " bar-unknown" : ""}`}
        role="progressbar"
        aria-label={label}
        aria-valuemin={0}
        aria-valuemax={100}
        aria-valuenow={part === null ? undefined : Math.floor(part * 100)}
      >
        <i style={{ width: part === null ? undefined : `${part * 100}%` }} />
      </div>
      {withPercent && <span className="progress-percent mono">{text}</span>}
    </div>
  )
}
