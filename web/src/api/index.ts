export { useAccountEvents, useEffectsById } from "./account"
export { type Act, useAct } from "./act"
export { cache } from "./cache"
export { api, type CallOptions, pathOf, type Query } from "./client"
export { connection, useOnline } from "./connection"
export { CONSOLE_EVENTS, useAuditNews } from "./console"
export { ApiError, asApiError } from "./errors"
export { listen, type ServerEvent, useEvents } from "./events"
export { type Pages, usePages } from "./pages"
export { type QueryOptions, type QueryResult, useQuery } from "./query"
export {
  effectsPathOf,
  includesRole,
  nameOf,
  type OperatorRole,
  onSignOut,
  type Session,
  type SessionKind,
  signIn,
  signInHere,
  signOut,
  useRoleReason,
  useSession,
} from "./session"
