/** The customers' frame: a bar at the top, and on phones another at the bottom. */

import type { ReactNode } from "react"
import { Link, useLocation } from "wouter"
import { nameOf, type Session, signOut, useQuery, useSession } from "@/api"
import { count, Icon, type IconName, Menu, type MenuItem } from "@/ui"
import { words } from "@/words/en/common"
import { Brand } from "./Brand"
import { openPalette } from "./paletteState"
import { chooseTheme, useTheme } from "./theme"

const LINKS = [
  { href: "/", label: words.nav.effects },
  { href: "/media", label: words.nav.media },
  { href: "/pipelines", label: words.nav.pipelines },
]
const BOTTOM: readonly { href: string; label: string; icon: IconName }[] = [
  { href: "/", label: words.nav.effects, icon: "grid" },
  { href: "/media", label: words.nav.media, icon: "picture" },
  { href: "/wallet", label: words.nav.wallet, icon: "token" },
  { href: "/account", label: words.nav.you, icon: "person" },
]

/** The user's pages besides effects and media, listed in the user menu and on the account page. */
export const OWN_PLACES: readonly { key: PlaceKey; href: string; icon: IconName }[] = [
  { key: "results", href: "/results", icon: "wipe" },
  { key: "pipelines", href: "/pipelines", icon: "tree" },
  { key: "graphs", href: "/graphs", icon: "graph" },
  { key: "triggers", href: "/triggers", icon: "clock" },
  { key: "wallet", href: "/wallet", icon: "token" },
  { key: "keys", href: "/keys", icon: "key" },
  { key: "webhooks", href: "/webhooks", icon: "bolt" },
]
type PlaceKey = "results" | "pipelines" | "graphs" | "triggers" | "wallet" | "keys" | "webhooks"

export function isCurrent(href: string, here: string): boolean {
  if (href === "/") return here === "/" || here.startsWith("/effects/")
  return here === href || here.startsWith(`${href}/`)
}

export function CustomerShell({ children }: { children: ReactNode }) {
  const [here] = useLocation()
  const session = useSession().data
  const isCustomer = session?.kinds.includes("customer") ?? false
  return (
    <div className="shell-customer">
      <header className="top">
        <Brand href="/" />
        <nav className="top-nav wide-only" aria-label={words.nav.main}>
          {LINKS.map(({ href, label }) => (
            <Link key={href} href={href} aria-current={isCurrent(href, here) ? "page" : undefined}>
              {label}
            </Link>
          ))}
        </nav>
        {/* The button is shorter in the catalog, which has its own search field. */}
        <button
          type="button"
          className={here === "/" ? "find find-short wide-only" : "find wide-only"}
          onClick={openPalette}
        >
          <Icon name="search" />
          <span>{words.nav.find}</span>
          <kbd>{shortcut()}</kbd>
        </button>
        <span className="top-end">
          {isCustomer && <Balance />}
          <PersonMenu session={session} />
        </span>
      </header>
      {children}
      <nav className="bottom" aria-label={words.nav.main}>
        {BOTTOM.map(({ href, label, icon }) => (
          <Link key={href} href={href} aria-current={isCurrent(href, here) ? "page" : undefined}>
            <Icon name={icon} size={20} />
            {label}
          </Link>
        ))}
      </nav>
    </div>
  )
}

export function shortcut(): string {
  return /Mac|iP/.test(navigator.platform) ? "⌘K" : "Ctrl K"
}

export function Balance() {
  const wallet = useQuery<{ balance: number }>("/api/wallet", { freshSeconds: 30 })
  return (
    <Link href="/wallet" className="balance">
      <Icon name="token" />
      <span className="unseen">{words.nav.balance}: </span>
      <b>{wallet.data ? count(wallet.data.balance) : "…"}</b>
      <span className="wide-only">{words.tokenWord(wallet.data?.balance ?? 0)}</span>
    </Link>
  )
}

export function PersonMenu({ session, upwards }: { session: Session | undefined; upwards?: boolean }) {
  const theme = useTheme()
  const [here] = useLocation()
  if (!session) return <span className="person" aria-hidden="true" />
  if (!session.signed_in)
    return (
      <>
        <Menu
          label={words.theme.label}
          icon={theme.shown === "dark" ? "moon" : "sun"}
          items={themeItems(theme.choice)}
        />
        <Link
          className="button button-plain button-normal"
          href={`/sign-in?next=${encodeURIComponent(here)}`}
        >
          {words.signIn}
        </Link>
      </>
    )
  const name = nameOf(session)
  const isIn = (kind: "customer" | "operator") => session.kinds.includes(kind)
  const items: (MenuItem | false)[] = [
    ...(isIn("customer") ? OWN_PLACES.map((place) => ({ ...place, label: words.nav[place.key] })) : []),
    isIn("operator") &&
      !here.startsWith("/console") && {
        key: "console",
        label: words.nav.console,
        icon: "console",
        href: "/console",
      },
    here.startsWith("/console") && {
      key: "customer",
      label: words.nav.customerPages,
      icon: "grid",
      href: "/",
    },
    ...themeItems(theme.choice),
    { key: "out", label: words.signOut, icon: "out", run: () => void signOut() },
  ]
  return (
    <Menu label={words.nav.account(name)} items={items} className="person-menu" upwards={upwards}>
      <span className="person" aria-hidden="true" data-initials={initials(name)} />
    </Menu>
  )
}

function themeItems(choice: string): MenuItem[] {
  const icons = { system: "machine", dark: "moon", light: "sun" } as const
  return (["system", "dark", "light"] as const).map((theme) => ({
    key: `theme-${theme}`,
    label: words.theme[theme],
    icon: icons[theme],
    checked: choice === theme,
    run: () => chooseTheme(theme),
  }))
}

function initials(name: string): string {
  const parts = name
    .replace(/^operator:/, "")
    .split(/[\s@._-]+/)
    .filter(Boolean)
  const letters =
    parts.length > 1 ? `${parts[0]?.[0] ?? ""}${parts[1]?.[0] ?? ""}` : (parts[0] ?? "").slice(0, 2)
  return letters.toUpperCase()
}
