/** Shows a result to anyone who has its link. */

import { useState } from "react"
import { useQuery } from "@/api"
import type { SharedAnswer } from "@/api/schema"
import { Brand } from "@/app/Brand"
import { Empty, ErrorNote, LinkButton, Skeleton, Time, useTitle } from "@/ui"
import { words } from "@/words/en/result"
import { View } from "../result/View"
import "../result/result.css"
import "./shared.css"

export default function Shared({ secret }: { secret: string }) {
  const shared = useQuery<SharedAnswer>(`/api/shared/${encodeURIComponent(secret)}`, { freshSeconds: 300 })
  useTitle(shared.data?.effect_title ?? words.sharedTitle)
  return (
    <div className="shared">
      <header className="top">
        <Brand href="/" />
      </header>
      {shared.data?.state === "ready" ? (
        <Ready shared={shared.data} />
      ) : shared.data ? (
        <Gone title={words.sharedExpired}>{words.sharedExpiredText}</Gone>
      ) : shared.error?.status === 404 ? (
        <Gone title={words.sharedMissing}>{words.sharedMissingText}</Gone>
      ) : shared.error ? (
        <div className="page">
          <ErrorNote error={shared.error} onRetry={shared.reload} />
        </div>
      ) : (
        <div className="result-stage" aria-busy="true">
          <Skeleton height="50vh" />
        </div>
      )}
    </div>
  )
}

function Gone({ title, children }: { title: string; children: string }) {
  return (
    <div className="page shared-gone">
      <Empty
        title={title}
        act={
          <LinkButton kind="go" href="/">
            {words.sharedWayOn}
          </LinkButton>
        }
      >
        {children}
      </Empty>
    </div>
  )
}

function Ready({ shared }: { shared: SharedAnswer }) {
  const [at, setAt] = useState(0)
  const file = shared.outputs[at] ?? shared.outputs[0]
  const title = shared.effect_title || words.sharedTitle
  return (
    <>
      <div className="result-stage">
        {file && <View key={at} file={file} before={shared.original} title={title} />}
      </div>
      <div className="result-under">
        <div className="result-who">
          <h1>{shared.effect_title ? words.sharedBy(shared.effect_title) : words.sharedTitle}</h1>
          <span className="faint">
            {words.expires} <Time at={shared.expires_at} />
          </span>
        </div>
        {shared.outputs.length > 1 && (
          <div className="result-row" role="group" aria-label={words.outputs}>
            {shared.outputs.map((output, place) => (
              <button
                key={output.url}
                type="button"
                className="print result-thumb"
                aria-label={words.output(output.filename)}
                aria-pressed={place === at}
                onClick={() => setAt(place)}
              >
                {output.content_type.startsWith("image/") && <img src={output.url} alt="" />}
              </button>
            ))}
          </div>
        )}
        <div className="result-acts">
          {file && (
            <LinkButton kind="go" icon="download" href={file.url} download={file.filename}>
              {words.download}
            </LinkButton>
          )}
        </div>
      </div>
    </>
  )
}
