import { type ButtonHTMLAttributes, type ReactNode, type Ref, useId } from "react"
import { Link } from "wouter"
import { Icon, type IconName } from "./Icon"

/** go: a view's single yellow main action; ink: an operator's main action; stop: a destructive
 * action; ghost: a secondary action. */
export type ButtonKind = "plain" | "go" | "ink" | "stop" | "ghost"
export type ButtonSize = "small" | "normal" | "large"

interface Look {
  kind?: ButtonKind
  size?: ButtonSize
  icon?: IconName
  children?: ReactNode
  /** Names a button that shows only an icon. */
  label?: string
}

type ButtonProps = Look &
  Omit<ButtonHTMLAttributes<HTMLButtonElement>, "disabled" | "children"> & {
    ref?: Ref<HTMLButtonElement>
    /** Explains why the button is disabled. A disabled button stays visible and focusable, and
     * shows the reason. */
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

/** A link to a page that looks like a button. `outside` means that the page isn't part of the
 * app. */
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
