/** The bar at the top of a graph page, and the page that is shown if the graph doesn't exist. */

import type { ReactNode } from "react"
import { Link } from "wouter"
import { Empty, LinkButton, useTitle } from "@/ui"
import { Mark } from "@/ui/Icon"
import { words } from "@/words/en/canvas"

interface BarProps {
  name: ReactNode
  status: ReactNode
  /** The graph's id, or null until the graph is first saved. */
  graphId: string | null
  view: "edit" | "run" | "runs"
  runId?: string
  children?: ReactNode
}

export function Bar({ name, status, graphId, view, runId, children }: BarProps) {
  const places = [
    { key: "edit", href: `/graphs/${graphId}`, label: words.modes.edit },
    ...(runId ? [{ key: "run", href: `/graphs/${graphId}/runs/${runId}`, label: words.modes.run }] : []),
    { key: "runs", href: `/graphs/${graphId}/runs`, label: words.modes.runs },
  ]
  return (
    <header className="canvas-bar">
      <Link href="/graphs" className="canvas-brand" aria-label={words.title} title={words.title}>
        <Mark />
      </Link>
      <div className="canvas-name">
        {name}
        <span className="badge">{status}</span>
      </div>
      {graphId && (
        <nav className="canvas-views" aria-label={words.views}>
          {places.map((place) => (
            <Link key={place.key} href={place.href} aria-current={place.key === view ? "page" : undefined}>
              {place.label}
            </Link>
          ))}
        </nav>
      )}
      {children}
    </header>
  )
}

/** Shown if the graph or the run doesn't exist. It contains a link, because these pages have no
 * navigation bar. */
export function NotThere({ title, href, act }: { title: string; href: string; act: string }) {
  useTitle(title)
  return (
    <div className="page page-alone">
      <h1 className="unseen">{title}</h1>
      <Empty
        title={title}
        act={
          <LinkButton kind="go" href={href}>
            {act}
          </LinkButton>
        }
      >
        {words.notThereText}
      </Empty>
    </div>
  )
}
