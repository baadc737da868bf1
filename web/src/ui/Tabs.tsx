/** Tabs for the parts of a page. The arrow keys move between them. */

import { type KeyboardEvent, type ReactNode, useId } from "react"
import { Badge } from "./Status"

export interface Tab<Key extends string = string> {
  key: Key
  title: ReactNode
  count?: number | undefined
}

interface TabsProps<Key extends string> {
  label: string
  tabs: readonly Tab<Key>[]
  value: Key
  onChange: (key: Key) => void
  /** The content of the selected tab. */
  children?: ReactNode
}

export function Tabs<Key extends string>({ label, tabs, value, onChange, children }: TabsProps<Key>) {
  const id = useId()
  const move = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key]
    if (!step) return
    event.preventDefault()
    const at = tabs.findIndex((tab) => tab.key === value)
    const next = tabs[(at + step + tabs.length) % tabs.length]
    if (!next) return
    onChange(next.key)
    document.getElementById(`${id}-${next.key}`)?.focus()
  }
  return (
    <>
      <div className="tabs" role="tablist" aria-label={label} onKeyDown={move}>
        {tabs.map((tab) => (
          <button
            key={tab.key}
            id={`${id}-${tab.key}`}
            type="button"
            role="tab"
            className="tab"
            aria-selected={tab.key === value}
            aria-controls={children === undefined ? undefined : `${id}-panel`}
            tabIndex={tab.key === value ? 0 : -1}
            onClick={() => onChange(tab.key)}
          >
            {tab.title}
            {tab.count !== undefined && <Badge>{tab.count.toLocaleString()}</Badge>}
          </button>
        ))}
      </div>
      {children !== undefined && (
        <div id={`${id}-panel`} role="tabpanel" aria-labelledby={`${id}-${value}`}>
          {children}
        </div>
      )}
    </>
  )
}
