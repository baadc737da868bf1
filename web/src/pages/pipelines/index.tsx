/** Lists pipelines and their runs. */

import { useState } from "react"
import { Link } from "wouter"
import { usePages } from "@/api"
import type { PipelineAnswer, PipelinePage } from "@/api/schema"
import { Button, Empty, ErrorNote, Loaded, Page, Skeleton, Time } from "@/ui"
import { words } from "@/words/en/pipelines"
import { NewPipeline } from "./NewPipeline"
import { Runs } from "./Runs"
import { StartRun } from "./StartRun"
import { stepsOf } from "./start"
import "./pipelines.css"

const PAGE = 20

export default function Pipelines() {
  const [isNew, setNew] = useState(false)
  const pages = usePages<PipelineAnswer, PipelinePage>(
    "/api/pipelines",
    { limit: PAGE },
    (answer) => answer.pipelines,
  )
  const isNone = pages.rows?.length === 0
  return (
    <Page
      title={words.title}
      className="pipelines"
      aside={<span className="quiet wide-only">{words.lead}</span>}
      actions={
        !isNone && (
          <Button icon="plus" onClick={() => setNew(true)}>
            {words.create.open}
          </Button>
        )
      }
    >
      <Loaded query={pages.first} skeleton={<Skeleton height="280px" />}>
        {() =>
          isNone ? (
            <Empty
              title={words.none}
              act={
                <Button kind="go" icon="plus" onClick={() => setNew(true)}>
                  {words.create.open}
                </Button>
              }
            >
              {words.noneText}
            </Empty>
          ) : (
            <>
              <section>
                <h2 className="pipelines-head">{words.runs}</h2>
                <Runs />
              </section>
              <section>
                <h2 className="pipelines-head">{words.pipelines}</h2>
                <ul className="pipelines-list">
                  {pages.rows?.map((pipeline) => (
                    <Row key={pipeline.id} pipeline={pipeline} />
                  ))}
                </ul>
              </section>
            </>
          )
        }
      </Loaded>
      {pages.more.error && <ErrorNote error={pages.more.error} />}
      {pages.hasMore && (
        <Button busy={pages.more.isRunning} onClick={() => void pages.more.run()}>
          {words.olderPipelines}
        </Button>
      )}
      <NewPipeline open={isNew} onClose={() => setNew(false)} />
    </Page>
  )
}

function Row({ pipeline }: { pipeline: PipelineAnswer }) {
  const [isStarting, setStarting] = useState(false)
  const steps = stepsOf(pipeline.document)
  return (
    <li className="pipelines-row">
      <Link href={`/pipelines/${pipeline.id}`} className="pipelines-name">
        <strong className="cut-text">{pipeline.name}</strong>
        <span className="faint cut-text">{steps.map((step) => step.name).join(" → ")}</span>
      </Link>
      <Time at={pipeline.created_at} />
      <Button size="small" icon="play" onClick={() => setStarting(true)}>
        {words.start.open}
      </Button>
      <StartRun pipeline={pipeline} open={isStarting} onClose={() => setStarting(false)} />
    </li>
  )
}
