import { type ButtonHTMLAttributes, type ReactNode, type Ref, useId } from "react"
import { Link } from "wouter"
import { Icon, type IconName } from "./Icon"

/** go: the one yellow act of a view; ink: an operator's main act; stop: destroys; ghost: beside others. */
export type ButtonKind = "plain" | "go" | "ink" | "stop" | "ghost"
export type ButtonSize = "small" | "normal" | "large"

interface Look {
  kind?: ButtonKind
  size?: ButtonSize
  icon?: IconName
  children?: ReactNode
  /** Of a button that shows an icon only. */
  label?: string
}

type ButtonProps = Look &
  Omit<ButtonHTMLAttributes<HTMLButtonElement>, "disabled" | "children"> & {
    ref?: Ref<HTMLButtonElement>
    /** Why it can't be pressed now: it stays visible, can be focused, and says so. */
    offReason?: string | null | false | undefined
    busy?: boolean
  }

function lookOf({ kind = "plain", size = "normal", children }: Look, extra = ""): string {
  const square = children === undefined ? " button-square" : ""
  return `button button-${kind} button-${size}${square}${extra}`
}

export function Button({
  kind,
  size,
  icon,
  children,
  label,
  offReason,
  busy,
  onClick,
  ...rest
}: ButtonProps) {
  const reasonId = useId()
  const isOff = Boolean(offReason) || busy
  return (
    <>
      <button
        type="button"
        {...rest}
        className={lookOf({ kind, size, children }, rest.className ? ` ${rest.className}` : "")}
        aria-label={label}
        title={label ?? (offReason || undefined)}
        aria-disabled={isOff || undefined}
        aria-busy={busy || undefined}
        aria-describedby={offReason ? reasonId : rest["aria-describedby"]}
        onClick={(event) => (isOff ? event.preventDefault() : onClick?.(event))}
      >
        {busy ? <span className="busy" aria-hidden="true" /> : icon && <Icon name={icon} />}
        {children}
      </button>
      {offReason && (
        <span id={reasonId} className="unseen">
          {offReason}
        </span>
      )}
    </>
  )
}

type LinkButtonProps = Look & {
  href: string
  className?: string
  download?: boolean | string
  outside?: boolean
}

/** Looks like a button and goes to a page. `outside`: not one of the app's own pages. */
export function LinkButton({
  href,
  kind,
  size,
  icon,
  children,
  label,
  className,
  download,
  outside,
}: LinkButtonProps) {
  const look = lookOf({ kind, size, children }, className ? ` ${className}` : "")
  const inner = (
    <>
      {icon && <Icon name={icon} />}
      {children}
    </>
  )
  if (outside || download !== undefined)
    return (
      <a href={href} className={look} aria-label={label} title={label} download={download} rel="noreferrer">
        {inner}
      </a>
    )
  return (
    <Link href={href} className={look} aria-label={label} title={label}>
      {inner}
    </Link>
  )
}
