/** Holds the session of the signed-in user. */

import { words } from "@/words/en/common"
import { cache } from "./cache"
import { api, SESSION, setCsrf } from "./client"
import { asApiError } from "./errors"
import { type QueryResult, useQuery } from "./query"

export type SessionKind = "customer" | "operator"

export interface SignInWays {
  key: boolean
  one_click: boolean
  oidc: boolean
  oidc_name?: string | null
}

export interface Session {
  signed_in: boolean
  kind: SessionKind | null
  kinds: readonly SessionKind[]
  tenant: { id: string; name: string } | null
  user: { id: string; name: string | null; email: string | null } | null
  scopes: readonly string[]
  operator: string | null
  role: string | null
  csrf: string | null
  expires_at: string | null
  /** True if visitors can see effects without signing in. */
  public_catalogue: boolean
  ways: SignInWays
}

export const SIGNED_OUT: Session = {
  signed_in: false,
  kind: null,
  kinds: [],
  tenant: null,
  user: null,
  scopes: [],
  operator: null,
  role: null,
  csrf: null,
  expires_at: null,
  public_catalogue: false,
  ways: { key: true, one_click: false, oidc: false },
}

async function read(signal: AbortSignal): Promise<Session> {
  try {
    return withCsrf(await api.get<Session>(SESSION, { signal }))
  } catch (thrown) {
    const { status } = asApiError(thrown)
    if (status === 401 || status === 404) return withCsrf(SIGNED_OUT)
    throw thrown
  }
}

function withCsrf(session: Session): Session {
  setCsrf(session.csrf)
  return session
}

export function useSession(): QueryResult<Session> {
  return useQuery<Session>(SESSION, { read, freshSeconds: 300 })
}

export async function signIn(key: string): Promise<Session> {
  return startSession(await api.post<Session>(SESSION, { key }))
}

/** Signs in with the one-time secret in the address that `comfyfleet up` prints. */
export async function signInHere(secret: string): Promise<Session> {
  return startSession(await api.post<Session>(`${SESSION}/local`, { secret }))
}

function startSession(session: Session): Session {
  cache.clear()
  cache.set<Session>(SESSION, () => withCsrf(session))
  cache.invalidate("/api/")
  return session
}

const whenSignedOut = new Set<() => void>()

/** Adds a listener that is called when the user has signed out. */
export function onSignOut(listener: () => void): void {
  whenSignedOut.add(listener)
}

/** Prefixes of the keys for unsaved graphs and forms. They are removed on sign-out, so that the
 * next user of this browser doesn't find them. */
const GRAPH_PREFIX = "comfyfleet.graph-"
const FORM_PREFIX = "comfyfleet.effect-"

function forgetDrafts(): void {
  try {
    for (const key of Object.keys(localStorage))
      if (key.startsWith(GRAPH_PREFIX)) localStorage.removeItem(key)
    for (const key of Object.keys(sessionStorage))
      if (key.startsWith(FORM_PREFIX)) sessionStorage.removeItem(key)
  } catch {
    // Storage is unavailable, so nothing was stored.
  }
}

export async function signOut(): Promise<void> {
  await api.delete(SESSION)
  forgetDrafts()
  for (const listener of whenSignedOut) listener()
  const { ways, public_catalogue } = cache.entry<Session>(SESSION).data ?? SIGNED_OUT
  cache.clear()
  cache.set<Session>(SESSION, () => withCsrf({ ...SIGNED_OUT, ways, public_catalogue }))
}

/** Returns the API path for this user's effects, or null if the session isn't known yet
 * or effects require a sign-in. */
export function effectsPathOf(session: Session | undefined): string | null {
  if (session?.kinds.includes("customer")) return "/api/effects"
  return session?.public_catalogue ? "/api/catalogue" : null
}

export type OperatorRole = "viewer" | "operator" | "owner"
const ROLES: readonly string[] = ["viewer", "operator", "owner"]

/** Checks whether a role includes another role's permissions. */
export function includesRole(role: string | null, needed: OperatorRole): boolean {
  return ROLES.indexOf(role ?? "") >= ROLES.indexOf(needed)
}

/** Explains why the user lacks the permissions of this role, or returns null if they have them. */
export function useRoleReason(needed: Exclude<OperatorRole, "viewer">): string | null {
  const role = useSession().data?.role ?? null
  if (includesRole(role, needed)) return null
  return words.needsRole[needed](words.roles[role ?? "viewer"] ?? role ?? "")
}

/** Returns the name that the top bar shows for the user. */
export function nameOf(session: Session): string {
  return session.user?.name ?? session.user?.email ?? session.tenant?.name ?? session.operator ?? ""
}
