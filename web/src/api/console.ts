/** What the console's pages share: the operators' stream. */

import { useEvents } from "./events"

export const CONSOLE_EVENTS = "/api/admin/events"

/** Called when something new is in the audit, and once when the stream begins: then what operators see may have changed. */
export function useAuditNews(onNews: () => void): void {
  useEvents(CONSOLE_EVENTS, (_, { event }) => {
    if (event === "audit") onNews()
  })
}
