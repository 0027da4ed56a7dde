//! Tests of the layer: what it logs, and that it changes nothing.

use super::*;
use crate::{fakes::FakeClock, mem::Mem};
use nacre_vfs::WriteOrigin;
use parking_lot::Mutex;
use std::fmt::Write as _;
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

/// A subscriber that keeps the lines up to a level.
struct Lines {
    most: Level,
    lines: Arc<Mutex<Vec<String>>>,
}

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == TARGET && *metadata.level() <= self.most
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &Event<'_>) {
        let mut text = Text(event.metadata().level().to_string());
        event.record(&mut text);
        self.lines.lock().push(text.0);
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// Lines of a failed look-up, a mkdir, and a write, with everything up to `most` enabled.
fn lines(level: TraceLevel, most: Level) -> Vec<String> {
    let lines = Arc::<Mutex<Vec<String>>>::default();
    tracing::subscriber::with_default(Lines { most, lines: Arc::clone(&lines) }, || {
        let layer = Trace::new(Arc::new(Mem::new()), level, Arc::new(FakeClock::default()));
        let root = layer.root().unwrap().node;
        let caller = Caller { uid: 5, gid: 6, pid: 7, umask: 0 };
        let missing = layer.lookup(&caller, &root, Name::new(b"mis\nsing").unwrap());
        assert_eq!(missing.unwrap_err(), Errno::ENOENT);
        layer.mkdir(&caller, &root, Name::new(b"d").unwrap(), 0o755).unwrap();
        let (_, file) = layer.tmpfile(&caller, &root, 0o600, OpenFlags::READ_WRITE).unwrap();
        assert_eq!(file.write(b"abc", 10, WriteOrigin::Caller), Ok(3));
    });
    let lines = lines.lock();
    lines.clone()
}

#[test]
fn changes_are_louder_than_questions() {
    let loud = lines(TraceLevel::Changes, Level::DEBUG);
    assert_eq!(
        loud,
        [
            r#"DEBUG operation="mkdir" name="d" uid=5 gid=6 pid=7 outcome="ok" micros=0"#,
            r#"DEBUG operation="tmpfile" name="" uid=5 gid=6 pid=7 outcome="ok" micros=0"#,
            r#"DEBUG operation="write" name="3 at 10" uid=0 gid=0 pid=0 outcome="ok" micros=0"#,
        ]
    );
}

#[test]
fn failures_are_part_of_the_line_and_never_a_warning() {
    let missing = r#"operation="lookup" name="mis\\nsing" uid=5 gid=6 pid=7 outcome="ENOENT" micros=0"#;
    assert_eq!(lines(TraceLevel::Changes, Level::TRACE).first(), Some(&format!("TRACE {missing}")));
    assert_eq!(lines(TraceLevel::All, Level::DEBUG).first(), Some(&format!("DEBUG {missing}")));
}

#[test]
fn nothing_is_logged_where_nobody_listens() {
    assert!(lines(TraceLevel::All, Level::INFO).is_empty());
}
