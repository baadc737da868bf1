/** What pages of one customer share: the stream of the account, and effects by their id. */

import { useMemo } from "react"
import { cache } from "./cache"
import { useEvents } from "./events"
import { useQuery } from "./query"
import type { EffectAnswer, FollowedJob, PublicEffects } from "./schema"

/** Jobs of the user, whenever one changes. The balance in the top bar follows by itself.
 *
 * `onWallet` is also called when the stream begins: what happened between the page's first read and then is read again.
 */
export function useAccountEvents(onJob?: (job: FollowedJob) => unknown, onWallet?: () => void): void {
  useEvents<FollowedJob & { balance?: number }>("/api/account/events", (data, { event }) => {
    if (event === "job") onJob?.(data)
    if (event !== "wallet" || data.balance === undefined) return
    const balance = data.balance
    cache.set<{ balance: number }>("/api/wallet", () => ({ balance }))
    onWallet?.()
  })
}

/** The catalogue by id; empty until it is there. Effects that are no longer published are not in it. */
export function useEffectsById(isWanted = true): ReadonlyMap<string, EffectAnswer> {
  const effects = useQuery<PublicEffects>(isWanted ? "/api/effects" : null, {
    query: { limit: 100 },
    freshSeconds: 60,
  })
  return useMemo(() => new Map(effects.data?.effects.map((each) => [each.id, each])), [effects.data])
}
