/** The frame of a page: its title in the tab and the heading, and its actions. */

import { type ReactNode, useEffect } from "react"
import { Link } from "wouter"
import { words } from "@/words/en/common"
import { Icon } from "./Icon"

interface PageProps {
  title: string
  /** Replaces the title in the heading. */
  head?: ReactNode
  /** Shown beside the title. */
  aside?: ReactNode
  actions?: ReactNode
  children: ReactNode
  className?: string
  /** Fills the window, so that parts of the page scroll instead of the page itself. */
  fill?: boolean
}

export function Page({ title, head, aside, actions, children, className, fill }: PageProps) {
  useTitle(title)
  return (
    <div className={`page${fill ? " page-fill" : ""}${className ? ` ${className}` : ""}`}>
      <header className="page-head">
        <h1>{head ?? title}</h1>
        {aside}
        {actions && <div className="page-actions">{actions}</div>}
      </header>
      {children}
    </div>
  )
}

/** Shown above an item's title: a link to its list, and its id. */
export function Crumb({ href, list, children }: { href: string; list: string; children: ReactNode }) {
  return (
    <nav className="crumb" aria-label={words.where}>
      <Link href={href}>{list}</Link>
      <Icon name="right" size={12} />
      {children}
    </nav>
  )
}

export function useTitle(title: string): void {
  useEffect(() => {
    document.title = title ? `${title} · comfyfleet` : "comfyfleet"
  }, [title])
}

export function Panel({
  title,
  aside,
  children,
  className,
}: {
  title?: ReactNode
  aside?: ReactNode
  children: ReactNode
  className?: string
}) {
  return (
    <section className={className ? `panel ${className}` : "panel"}>
      {(title || aside) && (
        <header>
          {title && <h2>{title}</h2>}
          {aside}
        </header>
      )}
      {children}
    </section>
  )
}
