/** The operators' event stream, which all console pages share. */

import { useEvents } from "./events"

export const CONSOLE_EVENTS = "/api/admin/events"

/** Calls `onNews` for each new audit entry and once when the stream starts, because the data on
 * the page may be outdated. */
export function useAuditNews(onNews: () => void): void {
  useEvents(CONSOLE_EVENTS, (_, { event }) => {
    if (event === "audit") onNews()
  })
}
