/** Tells the user that the connection is lost. The content stays on the screen while the app
 * reconnects. */

import { useEffect, useState, useSyncExternalStore } from "react"
import { connection, useOnline } from "@/api"
import { Icon } from "@/ui"
import { words } from "@/words/en/common"

export function ConnectionNotice() {
  const lost = useSyncExternalStore(connection.subscribe, connection.state)
  const isOnline = useOnline()
  const [, tick] = useState(0)
  useEffect(() => {
    if (!lost) return undefined
    const timer = setInterval(() => tick((count) => count + 1), 1000)
    return () => clearInterval(timer)
  }, [lost])
  return (
    <div role="status" className="notice-place">
      {!isOnline && (
        <div className="notice">
          <Icon name="offline" />
          <span>{words.offlineNotice}</span>
        </div>
      )}
      {isOnline && lost && (
        <div className="notice">
          <Icon name="offline" />
          <span>{words.connectionLost(Math.max(0, Math.round((lost.retryAt - Date.now()) / 1000)))}</span>
          <button type="button" className="link" onClick={() => connection.now()}>
            {words.now}
          </button>
        </div>
      )}
    </div>
  )
}
