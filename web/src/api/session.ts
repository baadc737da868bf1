/** Who is signed in. */

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
  /** Whether effects are shown to who has not signed in. */
  public_catalogue: boolean
  ways: SignInWays
}

export const NOBODY: Session = {
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
    return kept(await api.get<Session>(SESSION, { signal }))
  } catch (thrown) {
    const { status } = asApiError(thrown)
    if (status === 401 || status === 404) return kept(NOBODY)
    throw thrown
  }
}

function kept(session: Session): Session {
  setCsrf(session.csrf)
  return session
}

export function useSession(): QueryResult<Session> {
  return useQuery<Session>(SESSION, { read, freshSeconds: 300 })
}

export async function signIn(key: string): Promise<Session> {
  return begun(await api.post<Session>(SESSION, { key }))
}

/** With the one-time secret from the address that `comfyfleet up` has printed. */
export async function signInHere(secret: string): Promise<Session> {
  return begun(await api.post<Session>(`${SESSION}/local`, { secret }))
}

function begun(session: Session): Session {
  cache.clear()
  cache.set<Session>(SESSION, () => kept(session))
  cache.invalidate("/api/")
  return session
}

const whenOut = new Set<() => void>()

/** Called when whoever sat here has signed out. */
export function onSignOut(listener: () => void): void {
  whenOut.add(listener)
}

/** What a person has drawn or typed and not sent: nobody who signs in next at this machine shall find it. */
const DRAWN = "comfyfleet.graph-"
const TYPED = "comfyfleet.effect-"

function forgetDrafts(): void {
  try {
    for (const each of Object.keys(localStorage)) if (each.startsWith(DRAWN)) localStorage.removeItem(each)
    for (const each of Object.keys(sessionStorage))
      if (each.startsWith(TYPED)) sessionStorage.removeItem(each)
  } catch {
    // Nothing was kept.
  }
}

export async function signOut(): Promise<void> {
  await api.delete(SESSION)
  forgetDrafts()
  for (const each of whenOut) each()
  const { ways, public_catalogue } = cache.entry<Session>(SESSION).data ?? NOBODY
  cache.clear()
  cache.set<Session>(SESSION, () => kept({ ...NOBODY, ways, public_catalogue }))
}

/** Where effects are read from by whoever looks; null: nobody knows yet, or not without a sign-in. */
export function effectsPathOf(session: Session | undefined): string | null {
  if (session?.kinds.includes("customer")) return "/api/effects"
  return session?.public_catalogue ? "/api/catalogue" : null
}

export type OperatorRole = "viewer" | "operator" | "owner"
const ROLES: readonly string[] = ["viewer", "operator", "owner"]

/** Whether a role may do what another may. */
export function includesRole(role: string | null, needed: OperatorRole): boolean {
  return ROLES.indexOf(role ?? "") >= ROLES.indexOf(needed)
}

/** Why whoever is signed in may not do what takes this role; null: they may. */
export function useRoleReason(needed: Exclude<OperatorRole, "viewer">): string | null {
  const role = useSession().data?.role ?? null
  if (includesRole(role, needed)) return null
  return words.needsRole[needed](words.roles[role ?? "viewer"] ?? role ?? "")
}

/** A name of the person for the top bar. */
export function nameOf(session: Session): string {
  return session.user?.name ?? session.user?.email ?? session.tenant?.name ?? session.operator ?? ""
}
