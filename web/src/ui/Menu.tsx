/** A button that opens a list of actions. Arrow keys move the focus. Escape or a click outside
 * closes the list. */

import { type KeyboardEvent, type ReactNode, useEffect, useId, useRef, useState } from "react"
import { Link } from "wouter"
import { Button, type ButtonKind, type ButtonSize } from "./Button"
import { Icon, type IconName } from "./Icon"

export interface MenuItem {
  key: string
  label: ReactNode
  icon?: IconName
  run?: () => void
  href?: string
  danger?: boolean
  checked?: boolean
}

interface MenuProps {
  label: string
  items: readonly (MenuItem | null | false)[]
  /** Replaces the icon with three dots. */
  children?: ReactNode
  icon?: IconName
  kind?: ButtonKind
  size?: ButtonSize
  className?: string
  upwards?: boolean
}

export function Menu({ label, items, children, icon, kind = "ghost", size, className, upwards }: MenuProps) {
  const [isOpen, setOpen] = useState(false)
  const box = useRef<HTMLDivElement>(null)
  const opener = useRef<HTMLButtonElement>(null)
  const id = useId()
  useEffect(() => {
    if (!isOpen) return undefined
    box.current?.querySelector<HTMLElement>("[role^=menuitem]")?.focus()
    const close = (event: Event) => {
      if (!box.current?.contains(event.target as Node)) setOpen(false)
    }
    document.addEventListener("pointerdown", close)
    return () => document.removeEventListener("pointerdown", close)
  }, [isOpen])
  const closeAndReturn = () => {
    setOpen(false)
    opener.current?.focus()
  }
  const move = (event: KeyboardEvent) => {
    if (event.key === "Escape") {
      event.stopPropagation()
      closeAndReturn()
    }
    if (event.key === "Tab") setOpen(false)
    const entries = [...(box.current?.querySelectorAll<HTMLElement>("[role^=menuitem]") ?? [])]
    const at = entries.indexOf(document.activeElement as HTMLElement)
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: entries.length - 1 }[event.key]
    if (to === undefined) return
    event.preventDefault()
    entries[(to + entries.length) % entries.length]?.focus()
  }
  const shown = items.filter((item): item is MenuItem => Boolean(item))
  return (
    // biome-ignore lint/a11y/noStaticElementInteractions: the list inside handles the keys
    <div className={className ? `menu ${className}` : "menu"} ref={box} onKeyDown={isOpen ? move : undefined}>
      <Button
        ref={opener}
        kind={kind}
        size={size}
        icon={icon ?? (children === undefined ? "more" : undefined)}
        label={label}
        aria-haspopup="menu"
        aria-expanded={isOpen}
        aria-controls={isOpen ? id : undefined}
        onClick={() => setOpen(!isOpen)}
      >
        {children}
      </Button>
      {isOpen && (
        <div id={id} role="menu" className={upwards ? "menu-list menu-up" : "menu-list"} aria-label={label}>
          {shown.map((item) => (
            <Item key={item.key} item={item} close={closeAndReturn} />
          ))}
        </div>
      )}
    </div>
  )
}

function Item({ item, close }: { item: MenuItem; close: () => void }) {
  const inner = (
    <>
      {item.icon && <Icon name={item.icon} />}
      <span>{item.label}</span>
      {item.checked && <Icon name="tick" />}
    </>
  )
  if (item.href)
    return (
      <Link href={item.href} role="menuitem" tabIndex={-1} className="menu-item" onClick={close}>
        {inner}
      </Link>
    )
  return (
    <button
      type="button"
      role={item.checked === undefined ? "menuitem" : "menuitemcheckbox"}
      aria-checked={item.checked}
      tabIndex={-1}
      className={item.danger ? "menu-item is-danger" : "menu-item"}
      onClick={() => {
        close()
        item.run?.()
      }}
    >
      {inner}
    </button>
  )
}
