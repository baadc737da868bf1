/** Chooses the page and its shell by the address and the user. */

import { Component, type ReactNode, useEffect, useLayoutEffect, useRef, useState } from "react"
import { Redirect, Route, useLocation } from "wouter"
import { useOnline, useSession } from "@/api"
import { Button, Empty, ErrorNote, Late, LinkButton, Skeleton, useTitle } from "@/ui"
import { Toasts } from "@/ui/Toast"
import { words } from "@/words/en/common"
import { ConsoleShell } from "./ConsoleShell"
import { CustomerShell } from "./CustomerShell"
import { ConnectionNotice } from "./Notice"
import { Palette } from "./Palette"
import { findRoute, loadPointedAt, readFirst } from "./preload"
import type { Needs, PageRoute, Shell } from "./routes"

export function App() {
  useEffect(loadPointedAt, [])
  return (
    <>
      <a className="skip" href="#content">
        {words.skip}
      </a>
      <Shown />
      <Toasts />
      <Palette />
    </>
  )
}

/** Keeps the shell while the page changes, unless the next page uses a different one. */
function Shown() {
  const [here] = useLocation()
  const route = findRoute(here)
  return (
    <InShell shell={route?.shell ?? "customer"}>
      <Boundary key={here}>{route ? <OnePage route={route} /> : <NotFound />}</Boundary>
    </InShell>
  )
}

function OnePage({ route }: { route: PageRoute }) {
  const PageOf = usePage(route)
  return (
    <Allowed needs={route.needs}>
      <ReadFirst />
      {PageOf ? <Route path={route.path}>{(params) => <PageOf {...params} />}</Route> : <Coming />}
    </Allowed>
  )
}

/** Returns the page's code, or null until it has loaded. React's `lazy` would wait another 300
 * ms once it has shown a fallback. */
function usePage(route: PageRoute) {
  const [module, setModule] = useState(route.module)
  const [error, setError] = useState<unknown>(null)
  useEffect(() => {
    let isOver = false
    route.load().then(
      (loaded) => !isOver && setModule(loaded),
      (thrown: unknown) => !isOver && setError(thrown),
    )
    return () => {
      isOver = true
    }
  }, [route])
  if (error) throw error
  return module?.default
}

/** Starts the page's first requests before its code has loaded, if the user may see the page. */
function ReadFirst() {
  const [here] = useLocation()
  useLayoutEffect(() => readFirst(here), [here])
  return null
}

function InShell({ shell, children }: { shell: Shell; children: ReactNode }) {
  const content = <Content>{children}</Content>
  if (shell === "console") return <ConsoleShell>{content}</ConsoleShell>
  if (shell === "customer") return <CustomerShell>{content}</CustomerShell>
  return content
}

/** Scrolls each new page to the top and moves the focus there. */
function Content({ children }: { children: ReactNode }) {
  const [here] = useLocation()
  const content = useRef<HTMLElement>(null)
  const before = useRef(here)
  useEffect(() => {
    if (before.current === here) return
    before.current = here
    window.scrollTo(0, 0)
    content.current?.focus({ preventScroll: true })
  }, [here])
  return (
    <main id="content" ref={content} tabIndex={-1}>
      <ConnectionNotice />
      {children}
    </main>
  )
}

function Allowed({ needs, children }: { needs: Needs; children: ReactNode }) {
  const session = useSession()
  const [here] = useLocation()
  if (needs === "anybody") return children
  if (session.data === undefined) {
    if (session.error) return <ErrorNote error={session.error} onRetry={session.reload} />
    return <Coming />
  }
  const next = `/sign-in?next=${encodeURIComponent(here + window.location.search)}`
  if (!session.data.signed_in) return <Redirect to={next} replace />
  if (session.data.kinds.includes(needs)) return children
  return (
    <div className="page">
      <Empty
        title={words.notYours[needs]}
        act={
          <LinkButton kind="go" href={next}>
            {words.signIn}
          </LinkButton>
        }
      />
    </div>
  )
}

function Coming() {
  return (
    <div className="page" aria-busy="true">
      <div className="page-head">
        <Skeleton width="180px" height="28px" />
      </div>
      <Skeleton height="40vh" />
      <Late />
      <span className="unseen">{words.loading}</span>
    </div>
  )
}

function NotFound() {
  useTitle(words.notFound.title)
  return (
    <div className="page page-alone">
      <Empty
        title={words.notFound.title}
        act={
          <LinkButton kind="go" href="/">
            {words.notFound.act}
          </LinkButton>
        }
      >
        {words.notFound.text}
      </Empty>
    </div>
  )
}

/** Matches browsers' error messages for page code that could not be loaded. */
const NOT_LOADED = /dynamically imported|importing a module|preload|load failed/i
const RELOADED = "comfyfleet.reloaded"
const RELOADED_MS = 60_000
const LOOK_MS = 3_000

/** Allows one reload. A page that can't be loaded after that is broken. */
function mayReload(): boolean {
  try {
    return Date.now() - Number(sessionStorage.getItem(RELOADED) ?? 0) > RELOADED_MS
  } catch {
    return false
  }
}

/** Shown while the network or the service is unavailable. The page appears as soon as it can be
 * loaded. */
function NotLoaded() {
  const isOnline = useOnline()
  const title = isOnline ? words.notLoaded.title : words.notLoaded.offline
  useTitle(title)
  useEffect(() => {
    if (!isOnline) return undefined
    let timer: ReturnType<typeof setTimeout> | undefined
    const abort = new AbortController()
    const look = async () => {
      const answer = await fetch("/healthz", { cache: "no-store", signal: abort.signal }).catch(() => null)
      if (abort.signal.aborted) return
      if (answer?.ok) {
        sessionStorage.setItem(RELOADED, String(Date.now()))
        window.location.reload()
      } else timer = setTimeout(look, LOOK_MS)
    }
    void look()
    return () => {
      abort.abort()
      clearTimeout(timer)
    }
  }, [isOnline])
  return (
    <div className="page page-alone" role="status">
      <Empty title={title}>{words.notLoaded.text}</Empty>
    </div>
  )
}

/** Catches errors that a page throws while it renders, and page code that can't be loaded after
 * an update. */
class Boundary extends Component<{ children: ReactNode }, { error: Error | null }> {
  override state: { error: Error | null } = { error: null }

  static getDerivedStateFromError(error: Error) {
    return { error }
  }

  override render() {
    if (!this.state.error) return this.props.children
    if (NOT_LOADED.test(this.state.error.message) && mayReload()) return <NotLoaded />
    return (
      <div className="page page-alone">
        <Empty
          title={words.broken.title}
          act={
            <Button kind="go" onClick={() => window.location.reload()}>
              {words.broken.act}
            </Button>
          }
        >
          {words.broken.text} <code>{this.state.error.message}</code>
        </Empty>
      </div>
    )
  }
}
