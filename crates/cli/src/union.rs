//! `nacre union`: its command line ([`command`], [`plan`]: pure), and its verbs, which send
//! requests to the process that serves a union ([`run`]). The other end is `nacre_daemon::union`.

pub mod balancing;
pub mod command;
pub mod list;
pub mod metrics;
pub mod plan;
pub mod run;
