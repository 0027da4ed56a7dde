//! `nacre top` on a terminal: tabs, tables that are sorted by keys, and the history of a row.
//!
//! Called by [`super::run`]. A separate thread asks the mounts and pools, so that keys are handled
//! even while a mount or pool does not answer. Invariant: the terminal is restored when this
//! returns, panics, or is terminated (SIGTERM, SIGHUP, SIGINT).

use super::{
    TopOrder,
    tables::{self, Looks, ShownTable, Tab},
};
use crate::{clock, columns::Align, metrics::gathered::Everything};
use nacre_daemon::failure::Failure;
use nacre_sys::signals::{Signal, Signals};
use ratatui::{
    DefaultTerminal, Frame,
    crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers},
    layout::{Constraint, Layout, Rect},
    style::{Modifier, Style},
    text::Line,
    widgets::{Block, Borders, Cell, Paragraph, Row, Sparkline, Table, TableState, Tabs},
};
use rustix::{
    event::{PollFd, PollFlags},
    fs::Timespec,
};
use std::{
    collections::{HashMap, VecDeque},
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

/// Interval between checks for keys and signals.
const SOON: Duration = Duration::from_millis(100);
/// Number of samples in a history.
const HISTORY: usize = 512;
/// Lines of the history, with its frame.
const HISTORY_LINES: u16 = 6;
/// Space between two columns.
const GAP: u16 = 1;
/// Exit code that a shell reports for a program that SIGHUP has ended.
const HUNG_UP: i32 = 128 + 1;
const KEYS: &str = "q quit  ? columns  Tab table  1-9 sort/reverse  up/down row";

/// A sample and its time, or the failure to take one.
type Look = (Instant, Result<Everything, Failure>);

/// Shows the tables until the user quits.
///
/// # Errors
/// A mount point where nothing of ours is mounted; a terminal that cannot be used.
pub fn run(asked: TopOrder) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::io("cannot use", "the terminal", &error);
    let signals = Signals::block().map_err(failed)?;
    let ended = Arc::new(AtomicBool::new(false));
    let ending = Arc::clone(&ended);
    let obey = move || {
        while let Ok(signal) = signals.next() {
            if signal == Signal::Hangup {
                // Without its terminal, crossterm reads end-of-file in a loop and does not return.
                let _ = ratatui::try_restore();
                std::process::exit(HUNG_UP);
            }
            if signal != Signal::User1 {
                ending.store(true, Ordering::SeqCst);
            }
        }
    };
    thread::Builder::new().name("nacre-signals".to_owned()).spawn(obey).map_err(failed)?;
    let (sender, receiver) = sync_channel(1);
    let (tab, interval) = (asked.tab, Duration::from_secs_f64(asked.interval));
    let look = move || {
        loop {
            let gathered = Everything::gather(&asked.mountpoints, asked.everybody, false);
            // The view has ended.
            if sender.send((clock::now(), gathered)).is_err() {
                return;
            }
            clock::pause(interval);
        }
    };
    thread::Builder::new().name("nacre-looking".to_owned()).spawn(look).map_err(failed)?;
    let mut view = View { tab, ..View::default() };
    // A failure of the first sample is reported as by every other command.
    let (at, first) = receiver.recv().map_err(|_| Failure::new("nobody looks any more"))?;
    view.take(at, first?);
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let shown = show(&mut terminal, &mut view, &receiver, &ended);
    ratatui::restore();
    shown.map_err(failed)
}

fn show(terminal: &mut DefaultTerminal, view: &mut View, looks: &Receiver<Look>, ended: &AtomicBool) -> io::Result<()> {
    let mut changed = true;
    while !ended.load(Ordering::SeqCst) {
        while let Ok((at, look)) = looks.try_recv() {
            match look {
                Ok(everything) => view.take(at, everything),
                Err(failure) => view.trouble = Some(failure.what),
            }
            changed = true;
        }
        if changed {
            terminal.draw(|frame| draw(frame, view))?;
        }
        if hung_up()? {
            return Ok(());
        }
        changed = event::poll(SOON)?;
        if changed
            && let Event::Key(key) = event::read()?
            && key.kind != KeyEventKind::Release
            && view.key(key.code, key.modifiers)
        {
            return Ok(());
        }
    }
    Ok(())
}

/// Returns whether the terminal is gone; for processes that ignore SIGHUP (nohup(1)).
fn hung_up() -> io::Result<bool> {
    let stdin = io::stdin();
    let mut asked = [PollFd::new(&stdin, PollFlags::empty())];
    rustix::event::poll(&mut asked, Some(&Timespec::default()))?;
    Ok(asked.iter().any(|terminal| terminal.revents().intersects(PollFlags::HUP | PollFlags::ERR)))
}

/// State of the view.
#[derive(Default)]
struct View {
    tab: Tab,
    before: Option<(Instant, Everything)>,
    now: Option<(Instant, Everything)>,
    /// Sort column of each table, and whether the order is descending. Without one: the most active
    /// rows first.
    order: HashMap<Tab, (usize, bool)>,
    /// Whether the meanings of the columns are shown instead of the table.
    explains: bool,
    /// Key of the selected row.
    row: HashMap<Tab, String>,
    history: HashMap<(Tab, String), VecDeque<u64>>,
    scroll: TableState,
    /// The reason why there is no newer sample.
    trouble: Option<String>,
}

impl View {
    fn take(&mut self, at: Instant, everything: Everything) {
        self.before = self.now.take();
        self.now = Some((at, everything));
        self.trouble = None;
        // The first sample has no rates.
        let first = self.before.is_none();
        let mut history = HashMap::new();
        for tab in Tab::ALL {
            for row in self.table(tab).rows {
                let key = (tab, row.key);
                let mut past = self.history.remove(&key).unwrap_or_default();
                if !first || tab == Tab::Cages {
                    past.push_back(row.figure);
                }
                if past.len() > HISTORY {
                    past.pop_front();
                }
                history.insert(key, past);
            }
        }
        // Rows that are gone lose their history.
        self.history = history;
    }

    fn table(&self, tab: Tab) -> ShownTable {
        let Some((at, now)) = &self.now else { return ShownTable::default() };
        let before = self.before.as_ref();
        let seconds = before.map(|(then, _)| at.saturating_duration_since(*then).as_secs_f64());
        let mut table = tables::table(tab, Looks { before: before.map(|(_, look)| look), now, seconds });
        match self.order(tab) {
            Some((column, downwards)) => table.sort(column, downwards),
            None => table.sort_by_activity(),
        }
        table
    }

    fn order(&self, tab: Tab) -> Option<(usize, bool)> {
        self.order.get(&tab).copied()
    }

    /// Returns the number of the selected row.
    fn at(&self, table: &ShownTable) -> usize {
        let key = self.row.get(&self.tab);
        table.rows.iter().position(|row| Some(&row.key) == key).unwrap_or(0)
    }

    /// Handles a key; returns whether to quit.
    fn key(&mut self, code: KeyCode, modifiers: KeyModifiers) -> bool {
        let next = |tab: Tab, by: usize| {
            let place = Tab::ALL.iter().position(|one| *one == tab).unwrap_or(0) + by;
            Tab::ALL.get(place % Tab::ALL.len()).copied().unwrap_or_default()
        };
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => return true,
            KeyCode::Tab | KeyCode::Right => self.tab = next(self.tab, 1),
            KeyCode::BackTab | KeyCode::Left => self.tab = next(self.tab, Tab::ALL.len() - 1),
            KeyCode::Char('m') => self.tab = Tab::Mounts,
            KeyCode::Char('p') => self.tab = Tab::Pools,
            KeyCode::Char('d') => self.tab = Tab::Devices,
            KeyCode::Char('c') => self.tab = Tab::Cages,
            KeyCode::Char(digit @ '1'..='9') => self.sort_by(digit as usize - '1' as usize),
            KeyCode::Char('0') => self.sort_by(9),
            KeyCode::Char('?' | 'h') => self.explains = !self.explains,
            KeyCode::Up | KeyCode::Char('k') => self.go(-1),
            KeyCode::Down | KeyCode::Char('j') => self.go(1),
            _ => {}
        }
        false
    }

    fn sort_by(&mut self, column: usize) {
        let table = self.table(self.tab);
        let Some((_, align)) = table.headings.get(column) else { return };
        let downwards = match self.order(self.tab) {
            Some((before, downwards)) if before == column => !downwards,
            _ => *align == Align::Right,
        };
        self.order.insert(self.tab, (column, downwards));
    }

    fn go(&mut self, by: isize) {
        let table = self.table(self.tab);
        let to = self.at(&table).saturating_add_signed(by).min(table.rows.len().saturating_sub(1));
        if let Some(row) = table.rows.get(to) {
            self.row.insert(self.tab, row.key.clone());
        }
    }
}

fn draw(frame: &mut Frame<'_>, view: &mut View) {
    let parts = [Constraint::Length(1), Constraint::Min(3), Constraint::Length(HISTORY_LINES), Constraint::Length(1)];
    let [tabs, body, history, foot] = Layout::vertical(parts).areas(frame.area());
    let table = view.table(view.tab);
    let place = Tab::ALL.iter().position(|tab| *tab == view.tab).unwrap_or(0);
    let titles = Tab::ALL.map(|tab| {
        let number = view.now.as_ref().map_or(0, |(_, now)| match tab {
            Tab::Mounts => now.mounts.len(),
            Tab::Pools => now.pools.len(),
            Tab::Devices => now.pools.iter().map(|pool| pool.figures.devices.len()).sum(),
            Tab::Cages => now.cages.len(),
        });
        format!("{} {number}", tab.word())
    });
    let chosen = Style::new().add_modifier(Modifier::REVERSED);
    frame.render_widget(Tabs::new(titles).select(place).highlight_style(chosen).divider("|"), tabs);
    let at = view.at(&table);
    if view.explains {
        frame.render_widget(Paragraph::new(legend(view.tab)), body);
    } else {
        draw_table(frame, body, &table, view.order(view.tab), at, &mut view.scroll);
    }
    draw_history(frame, history, view, &table, at);
    let foot_text = view.trouble.as_deref().unwrap_or(KEYS);
    frame.render_widget(Paragraph::new(foot_text).style(Style::new().add_modifier(Modifier::DIM)), foot);
}

/// Returns the meaning of each column of a table.
fn legend(tab: Tab) -> String {
    tables::legend(tab).iter().map(|(heading, meaning)| format!("{heading:<10} {meaning}\n")).collect()
}

fn draw_table(
    frame: &mut Frame<'_>,
    area: Rect,
    table: &ShownTable,
    order: Option<(usize, bool)>,
    at: usize,
    scroll: &mut TableState,
) {
    if table.rows.is_empty() {
        return frame.render_widget(Paragraph::new("none"), area);
    }
    let heading = |place: usize, text: &str| {
        let mark = match order {
            Some((sorted, true)) if place == sorted => "-",
            Some((sorted, false)) if place == sorted => "+",
            _ => "",
        };
        format!("{text}{mark}")
    };
    let widths = widths(table, area.width);
    let cell = |place: usize, text: &str| {
        let width = usize::from(widths.get(place).copied().unwrap_or(0));
        let line = Line::from(if place == 0 { ended(text, width) } else { text.to_owned() });
        let right = table.headings.get(place).is_some_and(|(_, align)| *align == Align::Right);
        Cell::from(if right { line.right_aligned() } else { line })
    };
    let heads = table.headings.iter().enumerate().map(|(place, (text, _))| cell(place, &heading(place, text)));
    let head = Row::new(heads).style(Style::new().add_modifier(Modifier::BOLD));
    let rows = table
        .rows
        .iter()
        .map(|row| Row::new(row.cells.iter().enumerate().map(|(place, shown)| cell(place, &shown.text))));
    scroll.select(Some(at));
    let widget = Table::new(rows, widths.iter().map(|width| Constraint::Length(*width)))
        .header(head)
        .column_spacing(GAP)
        .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED));
    frame.render_stateful_widget(widget, area, scroll);
}

/// Returns the width of each column; the first one gets the remaining space.
fn widths(table: &ShownTable, whole: u16) -> Vec<u16> {
    let long = |text: &str| u16::try_from(text.chars().count()).unwrap_or(u16::MAX);
    let mut widths: Vec<u16> = table
        .headings
        .iter()
        .enumerate()
        .map(|(place, (heading, _))| {
            let cells = table.rows.iter().filter_map(|row| row.cells.get(place)).map(|cell| long(&cell.text));
            // With the sort indicator.
            cells.max().unwrap_or(0).max(long(heading) + 1)
        })
        .collect();
    let gaps = u16::try_from(widths.len().saturating_sub(1)).unwrap_or(0) * GAP;
    let others: u16 = widths.iter().skip(1).fold(gaps, |sum, width| sum.saturating_add(*width));
    if let Some(first) = widths.first_mut() {
        *first = whole.saturating_sub(others).max(8);
    }
    widths
}

/// Returns the end of a text that is too long: the end of a path identifies it better than its
/// beginning.
fn ended(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width || width < 3 {
        return text.to_owned();
    }
    let kept: String = text.chars().skip(length - (width - 2)).collect();
    format!("..{kept}")
}

fn draw_history(frame: &mut Frame<'_>, area: Rect, view: &View, table: &ShownTable, at: usize) {
    let Some(row) = table.rows.get(at) else { return };
    let past = view.history.get(&(view.tab, row.key.clone()));
    // As many values as fit, the newest at the right.
    let room = usize::from(area.width);
    let past: Vec<u64> = past.into_iter().flatten().copied().collect();
    let shown = past.get(past.len().saturating_sub(room)..).unwrap_or_default();
    let most = shown.iter().max().copied().unwrap_or(0);
    let name = row.cells.first().map(|cell| cell.text.as_str()).unwrap_or_default();
    let most = crate::columns::count(most);
    let title = format!("{} of {}, at most {most} ", view.tab.history(), ended(name, room.saturating_sub(46)));
    let block = Block::new().borders(Borders::TOP).title(title);
    frame.render_widget(Sparkline::default().block(block).data(shown), area);
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_daemon::report::Report;
    use ratatui::{Terminal, backend::TestBackend};

    fn screen(view: &mut View) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw(frame, view)).unwrap();
        let buffer = terminal.backend().buffer().clone();
        (0..24).map(|y| (0..80).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned()).collect()
    }

    fn look(requests: u64) -> Everything {
        let long = format!("/{}/the-end", "long".repeat(40));
        let mount = |place: &str, requests| Report { mountpoint: place.to_owned(), requests, ..Report::default() };
        let mounts = vec![mount("/a\\x1b[31m", requests), mount(&long, 5)];
        Everything { mounts, ..Everything::default() }
    }

    #[test]
    fn it_fits_and_obeys() {
        let (mut view, now) = (View::default(), Instant::now());
        view.take(now, look(0));
        view.take(now + Duration::from_secs(1), look(100));
        let shown = screen(&mut view);
        assert!(shown[0].contains("mounts 2") && shown[0].contains("cages 0"), "{shown:?}");
        assert!(shown[1].starts_with("MOUNTPOINT ") && shown[1].ends_with("PASS"), "{shown:?}");
        assert!(shown[2].starts_with("/a\\x1b[31m "), "{shown:?}");
        assert!(shown[3].starts_with("..") && shown[3].contains("/the-end"), "{shown:?}");
        assert!(shown[17].contains("requests per second of /a\\x1b[31m, at most 100"), "{shown:?}");
        assert_eq!(shown[23], KEYS);
        assert!(KEYS.len() <= 60, "narrow terminals");
        view.key(KeyCode::Char('?'), KeyModifiers::NONE);
        assert!(screen(&mut view).iter().any(|line| line.starts_with("PASS       ")));
        view.key(KeyCode::Char('?'), KeyModifiers::NONE);
        // By the second column: from the most down, then up.
        assert!(!view.key(KeyCode::Char('2'), KeyModifiers::NONE));
        assert!(screen(&mut view)[1].contains("REQ/S-"));
        view.key(KeyCode::Char('2'), KeyModifiers::NONE);
        assert!(screen(&mut view)[2].starts_with(".."));
        view.key(KeyCode::Down, KeyModifiers::NONE);
        assert_eq!(view.at(&view.table(Tab::Mounts)), 1);
        view.key(KeyCode::Tab, KeyModifiers::NONE);
        assert_eq!((view.tab, screen(&mut view)[1].as_str()), (Tab::Pools, "none"));
        view.key(KeyCode::Char('c'), KeyModifiers::NONE);
        assert_eq!(view.tab, Tab::Cages);
        assert!(
            view.key(KeyCode::Char('c'), KeyModifiers::CONTROL) && view.key(KeyCode::Char('q'), KeyModifiers::NONE)
        );
    }
}
