/** The operators' frame: a navigation with counts at the side, and on phones a bar at the
 * bottom. */

import { lazy, type ReactNode, Suspense, useEffect, useState, useSyncExternalStore } from "react"
import { Link, useLocation } from "wouter"
import { connection, useOnline, useSession } from "@/api"
import { Badge, count, Dialog, Icon, type IconName } from "@/ui"
import { words } from "@/words/en/common"
import { Brand } from "./Brand"
import { PersonMenu, shortcut } from "./CustomerShell"
import { type Counts, useConsoleCounts } from "./consoleCounts"
import { openPalette } from "./paletteState"
import { density } from "./theme"

const RailCounts = lazy(() => import("./RailCounts"))

interface Place {
  href: string
  label: string
  count?: keyof Counts
  /** The count of items that need an operator. It replaces the other count unless it is 0. */
  need?: keyof Counts
}

const GROUPS: readonly { title: string | null; places: readonly Place[] }[] = [
  {
    title: null,
    places: [
      { href: "/console", label: words.console.overview },
      { href: "/console/queue", label: words.console.queue, count: "queued" },
      { href: "/console/jobs", label: words.console.jobs },
    ],
  },
  {
    title: words.console.machines,
    places: [
      { href: "/console/workers", label: words.console.workers, count: "workers", need: "pending" },
      { href: "/console/fleets", label: words.console.fleets, count: "fleets" },
    ],
  },
  {
    title: words.console.content,
    places: [
      { href: "/console/workflows", label: words.console.workflows, count: "workflows" },
      { href: "/console/effects", label: words.console.effects, count: "effects" },
      { href: "/graphs", label: words.nav.graphs },
      { href: "/pipelines", label: words.nav.pipelines },
    ],
  },
  {
    title: words.console.business,
    places: [
      { href: "/console/tenants", label: words.console.tenants, count: "tenants" },
      { href: "/console/audit", label: words.console.audit },
      { href: "/console/settings", label: words.console.settings },
    ],
  },
]
const BOTTOM: readonly { href: string; label: string; icon: IconName }[] = [
  { href: "/console", label: words.console.overview, icon: "console" },
  { href: "/console/queue", label: words.console.queue, icon: "queue" },
  { href: "/console/workers", label: words.console.workers, icon: "machine" },
]

function isHere(href: string, here: string): boolean {
  return href === "/console" ? here === href : here === href || here.startsWith(`${href}/`)
}

export function ConsoleShell({ children }: { children: ReactNode }) {
  const [here] = useLocation()
  const session = useSession().data
  const [isMoreOpen, setMoreOpen] = useState(false)
  // biome-ignore lint/correctness/useExhaustiveDependencies: opening a page closes the list
  useEffect(() => setMoreOpen(false), [here])
  return (
    <div className="shell-console" data-density={density()}>
      {session?.kinds.includes("operator") && (
        <Suspense fallback={null}>
          <RailCounts />
        </Suspense>
      )}
      <div className="rail">
        <Brand href="/console" />
        <button type="button" className="find find-rail" onClick={openPalette}>
          <Icon name="search" />
          <span>{words.nav.findShort}</span>
          <kbd>{shortcut()}</kbd>
        </button>
        <Places here={here} />
        <div className="rail-foot">
          <Live />
          <PersonMenu session={session} upwards />
        </div>
      </div>
      <header className="top narrow-only">
        <Brand href="/console" />
        <span className="top-end">
          <Live />
          <PersonMenu session={session} />
        </span>
      </header>
      <div className="shell-main">{children}</div>
      <nav className="bottom" aria-label={words.nav.main}>
        {BOTTOM.map(({ href, label, icon }) => (
          <Link key={href} href={href} aria-current={isHere(href, here) ? "page" : undefined}>
            <Icon name={icon} size={20} />
            {label}
          </Link>
        ))}
        <button type="button" aria-haspopup="dialog" onClick={() => setMoreOpen(true)}>
          <Icon name="more" size={20} />
          {words.console.more}
        </button>
      </nav>
      <Dialog open={isMoreOpen} onClose={() => setMoreOpen(false)} title={words.nav.console}>
        <Places here={here} />
      </Dialog>
    </div>
  )
}

function Places({ here }: { here: string }) {
  const counts = useConsoleCounts()
  return (
    <nav className="places" aria-label={words.nav.console}>
      {GROUPS.map((group) => (
        <div key={group.title ?? ""} className="places-group">
          {group.title && <h2>{group.title}</h2>}
          {group.places.map((place) => {
            const number = place.count && counts[place.count]
            const needed = (place.need && counts[place.need]) || 0
            return (
              <Link
                key={place.href}
                href={place.href}
                aria-current={isHere(place.href, here) ? "page" : undefined}
              >
                <span>{place.label}</span>
                {needed > 0 ? (
                  <Badge need>
                    {count(needed)}
                    <span className="unseen"> {words.console.wantToJoin}</span>
                  </Badge>
                ) : (
                  number !== undefined && <Badge>{count(number)}</Badge>
                )}
              </Link>
            )
          })}
        </div>
      ))}
    </nav>
  )
}

function Live() {
  const lost = useSyncExternalStore(connection.subscribe, connection.state)
  const isLost = !useOnline() || lost !== null
  return (
    <span className={isLost ? "live is-lost" : "live"}>
      {isLost ? words.console.notLive : words.console.live}
    </span>
  )
}
